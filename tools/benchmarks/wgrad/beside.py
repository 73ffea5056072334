"""W in a CUDA graph, and W beside B on a stream of its own, against W after B on one stream.

A graph takes the launches away from the host: that can only help where the host is later than the device, so host and device
times are both taken, each in rounds of its own. The device's are taken behind a pause of the stream before every way, so that
the host is ahead; the host's from an idle device, as a pause fills the queue of launches and a full queue blocks. A graph's
kernels read fixed addresses, and what F and B leave lies elsewhere for every microbatch: the honest way copies the operands in
first; the graph alone is the best that any other arrangement could reach. A stream beside B's can only help where one of the two
leaves part of the device idle. Messages need no such stream: they have their own already, and W on the stream of the ops runs
beside them as it is.

W's operands here are tensors of this file, alive until all is measured. W of the store would free them on the host while a kernel
on the other stream has yet to read them, into the pool of B's stream: a feature made of this must keep them until both have met.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.wgrad.gemm import WgradKernel
from tools.benchmarks.wgrad.measure import Clock
from tools.benchmarks.wgrad.shapes import LayerShape
from tools.benchmarks.wgrad.stack import Stack
from tools.benchmarks.wgrad.together import ratio

Call = Callable[[], None]
PLAIN, GRAPH, COPIED_IN, SIDE, GRAPH_ON_SIDE = (
    "plain",
    "graph",
    "graph, operands copied in",
    "side stream",
    "graph on side stream",
)
WARM_UP = 3
"""Calls before a capture: what is loaded, chosen or allocated once must not be part of it."""


@dataclass(frozen=True, kw_only=True)
class WayTimes:
    """B of a stack and W of another microbatch, one way. Milliseconds of a layer, medians over the rounds."""

    way: str
    device_ms: float
    """From the begin of the first to the end of the last; the host had a head start."""
    host_ms: float
    """Until all of it had been given to the device, which was idle before."""
    ratio: float
    """Of the device's time to the plain way's; the median over the rounds."""


@dataclass(frozen=True, kw_only=True)
class BesideTimes:
    """Every way that could be measured."""

    ways: tuple[WayTimes, ...]
    not_measured: str
    """What could not, and why; empty where all could."""


class CaptureError(ExecutionError):
    """What was to be captured ran before, and cannot be captured. The cause is what the device said."""


class Card(Protocol):
    """What a device must offer. The real thing is `CudaCard`."""

    def captured(self, call: Call) -> Call:
        """A function that does on the device what `call` did when it was captured, to the same tensors.

        Raises:
            CaptureError: `call` does what cannot be captured.
        """

    def beside(self, side: Call, main: Call) -> None:
        """Give `side` to another stream and `main` to the current one; what follows waits for both."""


class CudaCard:
    """A GPU and one more stream. One for all that is measured, as it remembers whether captures fail.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._failed = ""

    def captured(self, call: Call) -> Call:
        """Capture a CUDA graph. `call` is run a few times before, on a stream of its own as torch wants it.

        Raises:
            CaptureError: `call` does what cannot be captured, for example waits for the device; or a capture failed before.
                torch's allocator and generators may still take that one to be under way, which another one would meet.
        """
        if self._failed:
            raise CaptureError(self._failed)

        def warm_up() -> None:
            for _ in range(WARM_UP):
                call()

        self.beside(warm_up, lambda: None)
        graph = torch.cuda.CUDAGraph()
        try:
            # torch does not go back to the stream before where a capture fails: the outer context does.
            with torch.cuda.stream(torch.cuda.current_stream(self._device)), torch.cuda.graph(graph):
                call()
        except RuntimeError as error:
            self._failed = _why_not(error)
            if not self._failed:
                raise
            raise CaptureError(self._failed) from error
        return graph.replay  # which holds the graph, and so the memory that its kernels use

    def beside(self, side: Call, main: Call) -> None:
        """`side` sees what the current stream has written so far, and afterwards the current stream sees what it wrote."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            side()
        main()
        current.wait_stream(self._side)


def _why_not(error: RuntimeError) -> str:
    """Why a capture failed; empty where that was not the capture's fault."""
    origin = error.__context__ or error  # the end of a broken capture fails as well, and hides what broke it
    is_refused = isinstance(origin, RuntimeError) and not isinstance(origin, torch.OutOfMemoryError)
    return str(origin).partition("\n")[0] if is_refused else ""


class LayerProducts:
    """W of a few layers and one microbatch: every linear's product, on operands that stay where they are.

    Args:
        shape: of a layer and its microbatch.
        count: layers.
        kernel: for W.
        device: where tensors live.
        dtype: of the operands.
    """

    def __init__(self, shape: LayerShape, count: int, kernel: WgradKernel, device: torch.device, dtype: torch.dtype) -> None:
        self._kernel = kernel
        linears = shape.linears * count
        self.operands = [self._random(shape.tokens, (each.out, each.in_), device, dtype) for each in linears]
        self.accumulators = [torch.zeros(each.out, each.in_, device=device) for each in linears]

    @staticmethod
    def _random(tokens: int, widths: Sequence[int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(torch.randn(tokens, width, device=device).to(dtype) for width in widths)

    def run(self) -> None:
        """W."""
        for accumulator, (grad_output, input_) in zip(self.accumulators, self.operands, strict=True):
            self._kernel.accumulate(accumulator, grad_output, input_)

    def load(self, other: Sequence[Sequence[Tensor]]) -> None:
        """Copy another microbatch's operands over these."""
        for mine, theirs in zip(self.operands, other, strict=True):
            for target, source in zip(mine, theirs, strict=True):
                target.copy_(source)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The ways there are on a card."""

    calls: Mapping[str, Callable[[Call], None]]
    """By name: B and W one way, given B."""
    not_measured: str
    """What is missing, and why; empty where nothing is."""


@torch.no_grad()
def ways_to_run(products: LayerProducts, card: Card) -> Ways:
    """All ways, or those without a graph where W cannot be captured. Whatever else goes wrong is raised."""

    def after(wgrad: Call) -> Callable[[Call], None]:
        def both(backward: Call) -> None:
            backward()
            wgrad()

        return both

    def beside(wgrad: Call) -> Callable[[Call], None]:
        return lambda backward: card.beside(wgrad, backward)

    plain, side = after(products.run), beside(products.run)
    try:
        replay = card.captured(products.run)
    except CaptureError as error:
        return Ways(calls={PLAIN: plain, SIDE: side}, not_measured=f"W in a CUDA graph, which cannot be captured: {error}")
    elsewhere = [[tensor.clone() for tensor in pair] for pair in products.operands]

    def copied_in() -> None:
        products.load(elsewhere)
        replay()

    graphs = {GRAPH: after(replay), COPIED_IN: after(copied_in), SIDE: side, GRAPH_ON_SIDE: beside(replay)}
    return Ways(calls={PLAIN: plain, **graphs}, not_measured="")


def measure_ways(
    shape: LayerShape,
    stack: Stack,
    products: LayerProducts,
    card: Card,
    *,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    warmup: int,
) -> BesideTimes:
    """B of `stack` with W of `products`, of `count` layers each, every way in every round, in changing order."""
    ways = ways_to_run(products, card)
    clock = Clock(device)
    host_ms: dict[str, list[float]] = {name: [] for name in ways.calls}
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    x_sbh, gradient = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    assert stack.store is not None

    def after_forward(name: str) -> Call:
        output = stack.forward(x_sbh.detach().requires_grad_())

        @torch.no_grad()  # which B does not mind
        def call() -> None:
            ways.calls[name](lambda: stack.backward(output, gradient, fused=False))

        return call

    names = list(ways.calls)
    for turn in range(warmup + repeats):
        first = turn % len(names)
        order = names[first:] + names[:first]
        for name in order:
            call = after_forward(name)
            clock.get_ahead()
            clock.time(name, call)
            stack.store.clear()  # what this B left: the W beside it was another microbatch's
        for name in order:
            host_ms[name].append(clock.host_ms(after_forward(name)))
            stack.store.clear()
    taken = {name: each[warmup:] for name, each in host_ms.items()}
    return BesideTimes(ways=summary(clock.read(skip=warmup), taken, count), not_measured=ways.not_measured)


def summary(device_ms: Mapping[str, Sequence[float]], host_ms: Mapping[str, Sequence[float]], count: int) -> tuple[WayTimes, ...]:
    """Medians of a layer, out of `count` of them."""
    return tuple(
        WayTimes(
            way=name,
            device_ms=statistics.median(taken) / count,
            host_ms=statistics.median(host_ms[name]) / count,
            ratio=ratio(taken, device_ms[PLAIN]),
        )
        for name, taken in device_ms.items()
    )
