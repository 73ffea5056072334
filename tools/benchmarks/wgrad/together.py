"""Weight gradients of several microbatches of one linear: one GEMM for all of them vs. one GEMM per microbatch.

W of K deferred microbatches is ``main_grad += sum_k dY_k^T X_k``, a single GEMM over K times the tokens. It writes the
accumulator once instead of K times, and small microbatches fill the device; but the operands of the microbatches lie wherever F
and B allocated them, and a GEMM takes one contiguous tensor. Three variants on the same numbers:

- *apart*: K GEMMs, as W runs today;
- *copied*: both operands are concatenated first, and the copies count;
- *adjacent*: they are contiguous already, which no run can guarantee: an upper bound for any replacement of the copies.

A single GEMM adds in another order than K GEMMs, so the bits of the results differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.zerobubble.wgrad.gemm import WgradKernel
from tools.benchmarks.wgrad.measure import CACHE_BYTES, MOST_ROTATIONS, Clock
from tools.benchmarks.wgrad.shapes import Linear

APART, COPIED, ADJACENT = "apart", "copied", "adjacent"


@dataclass(frozen=True, kw_only=True)
class TogetherTimes:
    """W of `count` microbatches of one linear with one kernel; times are in total over them, medians over the rounds."""

    linear: str
    out: int
    in_: int
    tokens: int
    """Tokens per microbatch."""
    count: int
    """Number of microbatches in one GEMM, K."""
    kernel: str
    apart_ms: float
    copied_ms: float
    adjacent_ms: float
    copied_ratio: float
    """Time of *copied* over *apart*; the median over the rounds."""
    adjacent_ratio: float
    """Time of *adjacent* over *apart*; the median over the rounds."""
    workspace_bytes: int
    """Memory of the copies."""
    difference: float
    """Largest difference between the results of one GEMM and of K GEMMs, relative to the largest entry."""


class Group:
    """The contiguous operands of W of several microbatches, and the variants of running it.

    Args:
        linear: the linear whose weight gradient is computed.
        tokens: tokens per microbatch.
        count: number of microbatches.
        device: device of the operands.
        dtype: dtype of the operands. They are accumulated in float32.
    """

    def __init__(self, linear: Linear, tokens: int, count: int, device: torch.device, dtype: torch.dtype) -> None:
        self.grad_outputs = torch.randn(count * tokens, linear.out, device=device).to(dtype)
        self.inputs = torch.randn(count * tokens, linear.in_, device=device).to(dtype)
        self.pairs = list(zip(self.grad_outputs.chunk(count), self.inputs.chunk(count), strict=True))

    def apart(self, kernel: WgradKernel, accumulator: Tensor) -> None:
        """Run one GEMM per microbatch."""
        for grad_output, input_ in self.pairs:
            kernel.accumulate(accumulator, grad_output, input_)

    def copied(self, kernel: WgradKernel, accumulator: Tensor, workspace: tuple[Tensor, Tensor]) -> None:
        """Concatenate the operands into `workspace`, of shapes [count * tokens, out] and [count * tokens, in]; run one GEMM."""
        grad_outputs, inputs = workspace
        torch.cat([grad_output for grad_output, _ in self.pairs], out=grad_outputs)
        torch.cat([input_ for _, input_ in self.pairs], out=inputs)
        kernel.accumulate(accumulator, grad_outputs, inputs)

    def adjacent(self, kernel: WgradKernel, accumulator: Tensor) -> None:
        """Run one GEMM on the contiguous operands."""
        kernel.accumulate(accumulator, self.grad_outputs, self.inputs)


def measure_together(
    linear: Linear,
    tokens: int,
    count: int,
    kernel: WgradKernel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    warmup: int,
) -> TogetherTimes:
    """Measure the three variants: all in every round, in changing order, on rotating operands."""
    clock = Clock(device)
    size = dtype.itemsize * tokens * count * (linear.out + linear.in_)
    rotations = min(MOST_ROTATIONS, max(2, -(-CACHE_BYTES[device.type] // size)))
    groups = [Group(linear, tokens, count, device, dtype) for _ in range(rotations)]
    workspace = torch.empty_like(groups[0].grad_outputs), torch.empty_like(groups[0].inputs)
    accumulator = torch.zeros(linear.out, linear.in_, device=device)
    ways: dict[str, Callable[[Group], None]] = {
        APART: lambda group: group.apart(kernel, accumulator),
        COPIED: lambda group: group.copied(kernel, accumulator, workspace),
        ADJACENT: lambda group: group.adjacent(kernel, accumulator),
    }
    names, position = list(ways), 0
    for number in range(warmup + repeats):
        clock.get_ahead()
        for index in range(len(names)):
            name = names[(index + number) % len(names)]
            group = groups[position % rotations]
            position += 1
            clock.time(name, lambda name=name, group=group: ways[name](group))  # type: ignore[misc]
    times = clock.read(skip=warmup)
    return TogetherTimes(
        linear=linear.name,
        out=linear.out,
        in_=linear.in_,
        tokens=tokens,
        count=count,
        kernel=kernel.kind.value,
        **{f"{name}_ms": statistics.median(taken) for name, taken in times.items()},
        copied_ratio=ratio(times[COPIED], times[APART]),
        adjacent_ratio=ratio(times[ADJACENT], times[APART]),
        workspace_bytes=sum(each.nbytes for each in workspace),
        difference=difference(groups[0], kernel, accumulator, workspace),
    )


def ratio(times: Sequence[float], over: Sequence[float]) -> float:
    """The median over the rounds of the ratio of two times of the same round."""
    return statistics.median(each / other for each, other in zip(times, over, strict=True))


def difference(group: Group, kernel: WgradKernel, accumulator: Tensor, workspace: tuple[Tensor, Tensor]) -> float:
    """Largest difference between one GEMM and K GEMMs, relative to the largest entry. Overwrites accumulator and workspace."""
    group.apart(kernel, accumulator.zero_())
    apart = accumulator.clone()
    group.copied(kernel, accumulator.zero_(), workspace)
    return float((accumulator - apart).abs().max() / apart.abs().max())
