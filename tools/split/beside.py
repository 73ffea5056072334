"""W in a CUDA graph, and W beside B on a stream of its own, against W after B on one stream.

A graph takes the launches away from the host: that can only help where the host is later than the device, so host and device
times are both taken. Its kernels read fixed addresses, and what F and B leave lies elsewhere for every microbatch: the honest way
copies the operands in first; the graph alone is the best that any other arrangement could reach. A stream beside B's can only
help where one of the two leaves part of the device idle. Messages need no such stream: they have their own already, and W on the
stream of the ops runs beside them as it is.

W's operands here are tensors of this file, alive until all is measured. W of the store would free them on the host while a kernel
on the other stream has yet to read them, into the pool of B's stream: a feature made of this must keep them until both have met.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.zerobubble.wgrad.gemm import WgradKernel
from tools.split.measure import Clock
from tools.split.shapes import LayerShape
from tools.split.stack import Stack
from tools.split.together import ratio

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
    """Until all of it had been given to the device."""
    ratio: float
    """Of the device's time to the plain way's; the median over the rounds."""


class Card(Protocol):
    """What a device must offer. The real thing is `CudaCard`."""

    def captured(self, call: Call) -> Call:
        """A function that does on the device what `call` did when it was captured, to the same tensors."""

    def beside(self, side: Call, main: Call) -> None:
        """Give `side` to another stream and `main` to the current one; what follows waits for both."""


class CudaCard:
    """A GPU and one more stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def captured(self, call: Call) -> Call:
        """Capture a CUDA graph. `call` is run a few times before, on a stream of its own as torch wants it.

        Raises:
            RuntimeError: `call` does what cannot be captured, for example waits for the device.
        """

        def warm_up() -> None:
            for _ in range(WARM_UP):
                call()

        self.beside(warm_up, lambda: None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay  # which holds the graph, and so the memory that its kernels use

    def beside(self, side: Call, main: Call) -> None:
        """`side` sees what the current stream has written so far, and afterwards the current stream sees what it wrote."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            side()
        main()
        current.wait_stream(self._side)


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


@torch.no_grad()
def ways_to_run(products: LayerProducts, card: Card) -> dict[str, Callable[[Call], None]]:
    """By name: B and W one way, given B.

    Raises:
        RuntimeError: W cannot be captured here.
    """
    replay = card.captured(products.run)
    elsewhere = [[tensor.clone() for tensor in pair] for pair in products.operands]

    def copied_in() -> None:
        products.load(elsewhere)
        replay()

    def after(wgrad: Call) -> Callable[[Call], None]:
        def both(backward: Call) -> None:
            backward()
            wgrad()

        return both

    return {
        PLAIN: after(products.run),
        GRAPH: after(replay),
        COPIED_IN: after(copied_in),
        SIDE: lambda backward: card.beside(products.run, backward),
        GRAPH_ON_SIDE: lambda backward: card.beside(replay, backward),
    }


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
) -> tuple[WayTimes, ...]:
    """B of `stack` with W of `products`, of `count` layers each, every way in every round, in changing order."""
    ways = ways_to_run(products, card)
    clock = Clock(device)
    host: dict[str, list[float]] = {name: [] for name in ways}
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    x_sbh, gradient = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    names = list(ways)
    for turn in range(warmup + repeats):
        clock.get_ahead()
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]
            output = stack.forward(x_sbh.detach().requires_grad_())

            def backward(output: Tensor = output) -> None:
                stack.backward(output, gradient, fused=False)

            begin = time.perf_counter()
            with torch.no_grad():  # which B does not mind
                clock.time(name, lambda name=name, backward=backward: ways[name](backward))  # type: ignore[misc]
            host[name].append((time.perf_counter() - begin) * 1000.0)
            assert stack.store is not None
            stack.store.clear()  # what this B left: the W beside it was another microbatch's
    device_ms = clock.read(skip=warmup)
    return summary(device_ms, {name: taken[warmup:] for name, taken in host.items()}, count)


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
