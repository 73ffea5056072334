"""Weight gradients of several microbatches of one linear: one product for all of them, against one for each.

W of K microbatches that wait together is ``main_grad += sum_k dY_k^T X_k``, which is one product over K times as many tokens. It
writes the accumulator once instead of K times, and a few tokens become enough to fill the device; but the microbatches' tensors
lie wherever F and B left them, and a product takes one tensor. Three ways on the same numbers:

- *apart*: K products, as W runs today;
- *copied*: both operands are copied side by side first, and the copies are part of the time;
- *adjacent*: they lie side by side already, which no run can promise: what copying could at best be replaced by.

Both ways of running them together add in another order than K products do, so their bits differ from those.
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
    """W of `count` microbatches of one linear with one kernel; milliseconds are of all of them, medians over the rounds."""

    linear: str
    out: int
    in_: int
    tokens: int
    """Of a microbatch."""
    count: int
    """Microbatches that run together."""
    kernel: str
    apart_ms: float
    copied_ms: float
    adjacent_ms: float
    copied_ratio: float
    """Copied over apart; the median over the rounds."""
    adjacent_ratio: float
    workspace_bytes: int
    """What the copies take."""
    difference: float
    """Of the sums, one product against K, relative to the largest entry."""


class Group:
    """The operands of W of several microbatches, side by side, and the ways to run it.

    Args:
        linear: whose weight gradient.
        tokens: of a microbatch.
        count: microbatches.
        device: where they live.
        dtype: of the operands. They are added up in float32.
    """

    def __init__(self, linear: Linear, tokens: int, count: int, device: torch.device, dtype: torch.dtype) -> None:
        self.grad_outputs = torch.randn(count * tokens, linear.out, device=device).to(dtype)
        self.inputs = torch.randn(count * tokens, linear.in_, device=device).to(dtype)
        self.pairs = list(zip(self.grad_outputs.chunk(count), self.inputs.chunk(count), strict=True))

    def apart(self, kernel: WgradKernel, accumulator: Tensor) -> None:
        """One product a microbatch."""
        for grad_output, input_ in self.pairs:
            kernel.accumulate(accumulator, grad_output, input_)

    def copied(self, kernel: WgradKernel, accumulator: Tensor, workspace: tuple[Tensor, Tensor]) -> None:
        """Copies, then one product. `workspace` is of the shapes of the group's operands."""
        grad_outputs, inputs = workspace
        torch.cat([grad_output for grad_output, _ in self.pairs], out=grad_outputs)
        torch.cat([input_ for _, input_ in self.pairs], out=inputs)
        kernel.accumulate(accumulator, grad_outputs, inputs)

    def adjacent(self, kernel: WgradKernel, accumulator: Tensor) -> None:
        """One product."""
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
    """The three ways, taking turns in changing order on operands that rotate."""
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
    for turn in range(warmup + repeats):
        clock.get_ahead()
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]
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
    """The median of the rounds' own ratios."""
    return statistics.median(each / other for each, other in zip(times, over, strict=True))


def difference(group: Group, kernel: WgradKernel, accumulator: Tensor, workspace: tuple[Tensor, Tensor]) -> float:
    """How far the sum of one product is from that of several, relative to its largest entry. Overwrites what is passed."""
    group.apart(kernel, accumulator.zero_())
    apart = accumulator.clone()
    group.copied(kernel, accumulator.zero_(), workspace)
    return float((accumulator - apart).abs().max() / apart.abs().max())
