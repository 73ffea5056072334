"""W in a CUDA graph, and W overlapped with B on a stream of its own, vs. W after B on one stream.

A graph saves launches on the host: that only helps if the host is slower than the device, so host and device times are measured
separately. Device times are taken after a pause of the stream before every variant, so that the host is ahead; host times from
an idle device, as a pause fills the launch queue and a full queue blocks. The kernels of a graph read fixed addresses, and F and
B allocate the operands elsewhere for every microbatch: so the realistic variant copies the operands in first; the graph alone is
an upper bound for any other arrangement. A side stream only helps if B or W leaves part of the device idle. P2P messages need no
side stream: they have their own already, and overlap with W on the stream of the ops.

W's operands here live until all measurements are done. W of the store would free them on the host while a kernel on the side
stream has yet to read them, into the memory pool of B's stream: a feature built on this must keep them until both streams have
synchronized.
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
"""Calls before a capture, so that one-time loading, selection and allocation are not part of it."""


@dataclass(frozen=True, kw_only=True)
class WayTimes:
    """Times of B of a stack and W of another microbatch in one variant: milliseconds per layer, medians over the rounds."""

    way: str
    device_ms: float
    """Device time from the start of the first to the end of the last; the host was ahead."""
    host_ms: float
    """Host time to issue everything to an idle device."""
    ratio: float
    """Device time over that of the plain variant; the median over the rounds."""


@dataclass(frozen=True, kw_only=True)
class BesideTimes:
    """The variants that could be measured."""

    ways: tuple[WayTimes, ...]
    not_measured: str
    """The variants that could not be measured, and why; empty if there are none."""


class CaptureError(ExecutionError):
    """A call runs, but cannot be captured in a CUDA graph. The cause is the error of the capture."""


class Card(Protocol):
    """Operations of a GPU that the variants need. The CUDA implementation is `CudaCard`."""

    def captured(self, call: Call) -> Call:
        """Capture `call`; returns a function that replays it on the same tensors.

        Raises:
            CaptureError: `call` cannot be captured.
        """

    def beside(self, side: Call, main: Call) -> None:
        """Run `side` on a side stream and `main` on the current one, which then waits for both."""


class CudaCard:
    """A GPU with one side stream. Use one instance for all measurements, as it remembers whether captures fail.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._failed = ""

    def captured(self, call: Call) -> Call:
        """Capture a CUDA graph. `call` is run a few times before, on the side stream as torch requires.

        Raises:
            CaptureError: `call` cannot be captured, for example because it synchronizes the device; or a capture failed before,
                in which case torch's allocator and generators may still consider it under way.
        """
        if self._failed:
            raise CaptureError(self._failed)

        def warm_up() -> None:
            for _ in range(WARM_UP):
                call()

        self.beside(warm_up, lambda: None)
        graph = torch.cuda.CUDAGraph()
        try:
            # torch does not restore the current stream if a capture fails: the outer context does.
            with torch.cuda.stream(torch.cuda.current_stream(self._device)), torch.cuda.graph(graph):
                call()
        except RuntimeError as error:
            self._failed = _why_not(error)
            if not self._failed:
                raise
            raise CaptureError(self._failed) from error
        return graph.replay  # which holds the graph, and so the memory that its kernels use

    def beside(self, side: Call, main: Call) -> None:
        """Run `side` on the side stream, after the current stream's work so far; the current stream then waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            side()
        main()
        current.wait_stream(self._side)


def _why_not(error: RuntimeError) -> str:
    """Why a capture failed; empty if the error has nothing to do with the capture."""
    origin = error.__context__ or error  # ending a broken capture fails as well, and hides the original error
    is_refused = isinstance(origin, RuntimeError) and not isinstance(origin, torch.OutOfMemoryError)
    return str(origin).partition("\n")[0] if is_refused else ""


class LayerGemms:
    """W of a few layers and one microbatch: the wgrad GEMM of every linear, on operands at fixed addresses.

    Args:
        shape: shape of a layer and its microbatch.
        count: number of layers.
        kernel: kernel of W.
        device: device of the tensors.
        dtype: dtype of the operands.
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
        """Run all wgrad GEMMs."""
        for accumulator, (grad_output, input_) in zip(self.accumulators, self.operands, strict=True):
            self._kernel.accumulate(accumulator, grad_output, input_)

    def load(self, other: Sequence[Sequence[Tensor]]) -> None:
        """Copy another microbatch's operands over these."""
        for mine, theirs in zip(self.operands, other, strict=True):
            for target, source in zip(mine, theirs, strict=True):
                target.copy_(source)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The variants that run on a card."""

    calls: Mapping[str, Callable[[Call], None]]
    """Name -> function that runs B, its argument, and W in this variant."""
    not_measured: str
    """The variants that do not run, and why; empty if all do."""


@torch.no_grad()
def ways_to_run(gemms: LayerGemms, card: Card) -> Ways:
    """All variants, or those without a graph if W cannot be captured. Other errors are raised."""

    def after(wgrad: Call) -> Callable[[Call], None]:
        def both(backward: Call) -> None:
            backward()
            wgrad()

        return both

    def beside(wgrad: Call) -> Callable[[Call], None]:
        return lambda backward: card.beside(wgrad, backward)

    plain, side = after(gemms.run), beside(gemms.run)
    try:
        replay = card.captured(gemms.run)
    except CaptureError as error:
        return Ways(calls={PLAIN: plain, SIDE: side}, not_measured=f"W in a CUDA graph, which cannot be captured: {error}")
    elsewhere = [[tensor.clone() for tensor in pair] for pair in gemms.operands]

    def copied_in() -> None:
        gemms.load(elsewhere)
        replay()

    graphs = {GRAPH: after(replay), COPIED_IN: after(copied_in), SIDE: side, GRAPH_ON_SIDE: beside(replay)}
    return Ways(calls={PLAIN: plain, **graphs}, not_measured="")


def measure_ways(
    shape: LayerShape,
    stack: Stack,
    gemms: LayerGemms,
    card: Card,
    *,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    warmup: int,
) -> BesideTimes:
    """Measure B of `stack` with W of `gemms`, of `count` layers each: every variant in every round, in changing order."""
    ways = ways_to_run(gemms, card)
    clock = Clock(device)
    host_ms: dict[str, list[float]] = {name: [] for name in ways.calls}
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    x_sbh, gradient = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    assert stack.store is not None

    def after_forward(name: str) -> Call:
        output = stack.forward(x_sbh.detach().requires_grad_())

        @torch.no_grad()  # which has no effect on B
        def call() -> None:
            ways.calls[name](lambda: stack.backward(output, gradient, fused=False))

        return call

    names = list(ways.calls)
    for number in range(warmup + repeats):
        first = number % len(names)
        order = names[first:] + names[:first]
        for name in order:
            call = after_forward(name)
            clock.get_ahead()
            clock.time(name, call)
            stack.store.clear()  # drop the operands of this B: the W that ran was another microbatch's
        for name in order:
            host_ms[name].append(clock.host_ms(after_forward(name)))
            stack.store.clear()
    taken = {name: each[warmup:] for name, each in host_ms.items()}
    return BesideTimes(ways=summary(clock.read(skip=warmup), taken, count), not_measured=ways.not_measured)


def summary(device_ms: Mapping[str, Sequence[float]], host_ms: Mapping[str, Sequence[float]], count: int) -> tuple[WayTimes, ...]:
    """Median times per layer, from times of `count` layers."""
    return tuple(
        WayTimes(
            way=name,
            device_ms=statistics.median(taken) / count,
            host_ms=statistics.median(host_ms[name]) / count,
            ratio=ratio(taken, device_ms[PLAIN]),
        )
        for name, taken in device_ms.items()
    )
