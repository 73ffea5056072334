"""Times of passes and of single products, on one clock, taking turns, with cold caches.

On CUDA a time is the distance of two events on the stream. Nothing waits for the device inside a round, and each round begins
with a pause of the stream in which the host gets ahead, so that no gap between two kernels is the host's. Inputs rotate: what a
product reads has left the cache since it was last read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.wgrad.gemm import WgradKernel
from tools.benchmarks.wgrad.shapes import LayerShape, Linear
from tools.benchmarks.wgrad.stack import Stack

CACHE_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
"""Operands rotate through at least so much: a few times the last-level cache."""
MOST_ROTATIONS = 16
PAUSE_CYCLES = 40_000_000
"""About 20 ms of a stream."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Milliseconds of a layer, medians over the rounds."""

    forward_ms: float
    backward_ms: float
    wgrad_ms: float
    fused_ms: float
    """The classic backward through our store, with the same kernel."""
    stock_ms: float
    """megatron-core's own backward, its gradients added by DDP's hook."""
    split_ratio: float
    """(B + W) over the faster of the two backwards; the median over the rounds."""
    held_bytes: float
    """In the store between B and W, a layer."""
    allocated_bytes: float | None
    """What the allocator got back in W, a layer; None on the CPU."""
    activation_bytes: float | None
    """What the allocator gave away in F, a layer; None on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ProductTimes:
    """Of W of one linear."""

    linear: str
    out: int
    in_: int
    tokens: int
    flops: int
    plain_matmul_ms: float
    """``dY^T X`` alone, in the inputs' dtype."""
    kernels_ms: dict[str, float]
    """By name, into the fp32 accumulator."""


class Clock:
    """Takes times on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks = Marks(device)
        self._spans: dict[str, list[tuple[object, object]]] = {}

    def time(self, name: str, call: Callable[[], object]) -> None:
        """Call, and note how long it takes under `name`."""
        begin = self._marks.now()
        call()
        self._spans.setdefault(name, []).append((begin, self._marks.now()))

    def host_ms(self, call: Callable[[], object]) -> float:
        """Milliseconds until the host has given `call` to the device, which has nothing else to do: no full queue holds it up."""
        self._marks.synchronize()
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1000.0

    def get_ahead(self) -> None:
        """Let the host queue work before the device begins with it."""
        if self._marks.on_cuda:
            torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]

    def read(self, *, skip: int) -> dict[str, list[float]]:
        """Milliseconds by name, without the first `skip` of each; waits for the device and forgets them."""
        self._marks.synchronize()
        spans, self._spans = self._spans, {}
        return {name: [self._marks.elapsed_ms(*span) for span in taken[skip:]] for name, taken in spans.items()}


def measure_passes(
    shape: LayerShape,
    split: Stack,
    stock: Stack,
    *,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    warmup: int,
) -> PassTimes:
    """F, B, W and the two classic backwards of stacks of `count` layers. They take turns in every round, in changing order."""
    clock, held = Clock(device), _Held(device)
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    buffers = [torch.randn(size, device=device).to(dtype) for _ in range(4)]
    gradients = [torch.randn(size, device=device).to(dtype) for _ in range(4)]

    def classic(stack: Stack, name: str, turn: int) -> None:
        output = stack.forward(buffers[turn % 4].detach().requires_grad_())
        clock.time(name, lambda: stack.backward(output, gradients[(turn + 1) % 4], fused=True))

    def ours(turn: int) -> None:
        x_sbh = buffers[turn % 4].detach().requires_grad_()
        outputs: list[Tensor] = []
        held.before_forward()
        clock.time("forward", lambda: outputs.append(split.forward(x_sbh)))
        held.after_forward()
        clock.time("backward", lambda: split.backward(outputs[0], gradients[(turn + 1) % 4], fused=False))
        outputs.clear()
        x_sbh.grad = None
        held.before_wgrad(split)
        clock.time("wgrad", split.weight_gradient)
        held.after_wgrad()

    turns: list[Callable[[int], None]] = [
        ours,
        lambda turn: classic(split, "fused", turn),
        lambda turn: classic(stock, "stock", turn),
    ]
    for turn in range(warmup + repeats):
        clock.get_ahead()
        for index in range(len(turns)):
            turns[(index + turn) % len(turns)](turn)
    times = clock.read(skip=warmup)
    medians = {name: statistics.median(taken) / count for name, taken in times.items()}
    rows = zip(times["backward"], times["wgrad"], times["fused"], times["stock"], strict=True)
    faster_is_stock = medians["stock"] < medians["fused"]
    return PassTimes(
        **{f"{name}_ms": value for name, value in medians.items()},
        split_ratio=statistics.median((b + w) / (stock if faster_is_stock else fused) for b, w, fused, stock in rows),
        held_bytes=held.in_store / count,
        allocated_bytes=None if held.freed is None else held.freed / count,
        activation_bytes=None if held.taken is None else held.taken / count,
    )


class _Held:
    """What is held between the passes. On CUDA the allocator's books are the host's: reading them waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._before = 0
        self.in_store = 0
        self.freed: int | None = None
        self.taken: int | None = None

    def before_forward(self) -> None:
        self._before = self._allocated()

    def after_forward(self) -> None:
        if self._on_cuda:
            self.taken = self._allocated() - self._before

    def before_wgrad(self, stack: Stack) -> None:
        assert stack.store is not None
        self.in_store = stack.store.pending_bytes
        self._before = self._allocated()

    def after_wgrad(self) -> None:
        if self._on_cuda:
            self.freed = self._before - self._allocated()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._on_cuda else 0


def measure_product(
    linear: Linear,
    tokens: int,
    kernels: Sequence[WgradKernel],
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    warmup: int,
) -> ProductTimes:
    """W of one linear by each kernel, and the plain matmul of its shape, taking turns on operands that rotate."""
    clock = Clock(device)
    one = dtype.itemsize * tokens * (linear.out + linear.in_)
    rotations = min(MOST_ROTATIONS, max(2, -(-CACHE_BYTES[device.type] // one)))
    pairs = [
        (torch.randn(tokens, linear.out, device=device).to(dtype), torch.randn(tokens, linear.in_, device=device).to(dtype))
        for _ in range(rotations)
    ]
    accumulator = torch.zeros(linear.out, linear.in_, device=device)
    product = torch.empty(linear.out, linear.in_, device=device, dtype=dtype)

    def plain(grad_output: Tensor, input_: Tensor) -> None:
        torch.mm(grad_output.t(), input_, out=product)

    def accumulating(kernel: WgradKernel) -> Callable[[Tensor, Tensor], None]:
        return lambda grad_output, input_: kernel.accumulate(accumulator, grad_output, input_)

    turns = [("plain", plain), *((kernel.kind.value, accumulating(kernel)) for kernel in kernels)]
    position = 0
    for turn in range(warmup + repeats):
        clock.get_ahead()
        for index in range(len(turns)):
            name, call = turns[(index + turn) % len(turns)]
            operands = pairs[position % rotations]
            position += 1
            clock.time(name, partial(call, *operands))
    medians = {name: statistics.median(taken) for name, taken in clock.read(skip=warmup).items()}
    return ProductTimes(
        linear=linear.name,
        out=linear.out,
        in_=linear.in_,
        tokens=tokens,
        flops=linear.flops(tokens),
        plain_matmul_ms=medians.pop("plain"),
        kernels_ms=medians,
    )
