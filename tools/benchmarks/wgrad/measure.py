"""Measure passes and single GEMMs on one clock, in rounds, with cold caches.

On CUDA a time is the distance of two events on the stream. Nothing synchronizes inside a round, and each round begins with a
pause of the stream in which the host gets ahead, so that no gap between two kernels is caused by the host. Operands rotate: they
have left the cache since they were last read.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.wgrad.gemm import WgradKernel
from tools.benchmarks.wgrad.shapes import LayerShape, Linear
from tools.benchmarks.wgrad.stack import Stack

CACHE_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
"""Operands rotate through at least this number of bytes: a few times the last-level cache."""
MOST_ROTATIONS = 16
LEAST_ROUNDS = 5
"""Rounds that count, however long they take."""
PAUSE_CYCLES = 40_000_000
"""Length of the pause of the stream, about 20 ms."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Times of a layer in milliseconds, medians over the rounds, and bytes per layer."""

    forward_ms: float
    backward_ms: float
    wgrad_ms: float
    fused_ms: float
    """The full backward (B+W) through our store, with the same kernel."""
    stock_ms: float
    """megatron-core's own backward, with gradients added by DDP's hook."""
    split_ratio: float
    """(B + W) over the faster of the two full backwards; the median over the rounds."""
    held_bytes: float
    """Bytes in the store between B and W, per layer."""
    rounds: int


@dataclass(frozen=True, kw_only=True)
class GemmTimes:
    """Times of the wgrad GEMM of one linear, medians over the rounds."""

    linear: str
    out: int
    in_: int
    tokens: int
    flops: int
    plain_matmul_ms: float
    """``dY^T X`` alone, in the inputs' dtype."""
    kernels_ms: dict[str, float]
    """Milliseconds by name of the kernel, accumulating in fp32."""


class Clock:
    """Measures times on one device.

    Args:
        device: the device on which the calls run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks = Marks(device)
        self._spans: dict[str, list[tuple[object, object]]] = {}

    def time(self, name: str, call: Callable[[], object]) -> None:
        """Run `call`, and record its time under `name`."""
        begin = self._marks.now()
        call()
        self._spans.setdefault(name, []).append((begin, self._marks.now()))

    def get_ahead(self) -> None:
        """Pause the stream, so that the host queues work before the device begins with it."""
        if self._marks.on_cuda:
            torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until the device has run all calls."""
        self._marks.synchronize()

    def read(self, *, skip: int) -> dict[str, list[float]]:
        """Return the milliseconds by name, without the first `skip` of each, and clear them. Synchronizes the device."""
        self._marks.synchronize()
        spans, self._spans = self._spans, {}
        return {name: [self._marks.elapsed_ms(*span) for span in taken[skip:]] for name, taken in spans.items()}


def rounds(clock: Clock, *, repeats: int, warmup: int, seconds: float = math.inf) -> Iterator[int]:
    """Number the rounds, each behind a pause. After `seconds` of those that count, and `LEAST_ROUNDS` of them, none begins."""
    end = math.inf
    for number in range(warmup + repeats):
        if number == warmup:
            end = time.monotonic() + seconds
        if number >= warmup + LEAST_ROUNDS and time.monotonic() > end:
            return
        clock.get_ahead()
        yield number
        clock.synchronize()


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
    seconds: float = math.inf,
) -> PassTimes:
    """Measure F, B, W and the two full backwards of stacks of `count` layers: all in every round, in changing order."""
    clock, held_bytes = Clock(device), 0
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    buffers = [torch.randn(size, device=device).to(dtype) for _ in range(4)]
    gradients = [torch.randn(size, device=device).to(dtype) for _ in range(4)]

    def full_backward(stack: Stack, name: str, number: int) -> None:
        output = stack.forward(buffers[number % 4].detach().requires_grad_())
        clock.time(name, lambda: stack.backward(output, gradients[(number + 1) % 4], fused=True))

    def ours(number: int) -> None:
        nonlocal held_bytes
        assert split.store is not None
        x_sbh = buffers[number % 4].detach().requires_grad_()
        outputs: list[Tensor] = []
        clock.time("forward", lambda: outputs.append(split.forward(x_sbh)))
        clock.time("backward", lambda: split.backward(outputs[0], gradients[(number + 1) % 4], fused=False))
        outputs.clear()
        x_sbh.grad = None
        held_bytes = split.store.pending_bytes
        clock.time("wgrad", split.weight_gradient)

    contenders: list[Callable[[int], None]] = [
        ours,
        lambda number: full_backward(split, "fused", number),
        lambda number: full_backward(stock, "stock", number),
    ]
    for number in rounds(clock, repeats=repeats, warmup=warmup, seconds=seconds):
        for index in range(len(contenders)):
            contenders[(index + number) % len(contenders)](number)
    times = clock.read(skip=warmup)
    medians = {name: statistics.median(taken) / count for name, taken in times.items()}
    rows = zip(times["backward"], times["wgrad"], times["fused"], times["stock"], strict=True)
    faster_is_stock = medians["stock"] < medians["fused"]
    return PassTimes(
        **{f"{name}_ms": value for name, value in medians.items()},
        split_ratio=statistics.median((b + w) / (stock if faster_is_stock else fused) for b, w, fused, stock in rows),
        held_bytes=held_bytes / count,
        rounds=len(times["wgrad"]),
    )


def measure_gemm(
    linear: Linear,
    tokens: int,
    kernels: Sequence[WgradKernel],
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    warmup: int,
    seconds: float = math.inf,
) -> GemmTimes:
    """Measure W of one linear by each kernel, and the plain matmul of its shape: all in every round, on rotating operands."""
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

    contenders = [("plain", plain), *((kernel.kind.value, accumulating(kernel)) for kernel in kernels)]
    position = 0
    for number in rounds(clock, repeats=repeats, warmup=warmup, seconds=seconds):
        for index in range(len(contenders)):
            name, call = contenders[(index + number) % len(contenders)]
            operands = pairs[position % rotations]
            position += 1
            clock.time(name, partial(call, *operands))
    medians = {name: statistics.median(taken) for name, taken in clock.read(skip=warmup).items()}
    return GemmTimes(
        linear=linear.name,
        out=linear.out,
        in_=linear.in_,
        tokens=tokens,
        flops=linear.flops(tokens),
        plain_matmul_ms=medians.pop("plain"),
        kernels_ms=medians,
    )
