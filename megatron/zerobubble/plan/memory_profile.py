"""Activation memory over time: a timeline and costs -> a step function per rank.

F allocates a stage's activation when it starts; B frees all but `activation_after_backward` when it ends, W the rest when it
ends, and BW both. The highest step is the simulator's peak (`simulate.peak_memory`), in the same unit: 1.0 is 1F1B's rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.simulate import TimedOp, memory_after_ops

Stair = tuple[tuple[float, float], ...]
"""A step function as (time in milliseconds, activation memory from then on), in ascending time."""


def activation_memory_over_time(rows: Sequence[Sequence[TimedOp]], num_microbatches: int, costs: CostModel) -> tuple[Stair, ...]:
    """Activation memory per rank, with one step per op in the order of the ops; 1.0 is 1F1B's rank 0.

    Args:
        rows: the timed ops per rank, simulated or recorded, with backward passes.
        num_microbatches: m.
        costs: activation memory per stage; of unequal microbatches in the plan's own order (`CostModel.reordered`).
    """
    unit = min(len(rows), num_microbatches)
    return tuple(_stair(row, costs, unit) for row in rows)


def _stair(row: Sequence[TimedOp], costs: CostModel, unit: int) -> Stair:
    memory = memory_after_ops([timed.op for timed in row], costs)
    starts = (start if op.kind is OpKind.F else end for op, start, end in row)
    return tuple((at, value / unit) for at, value in zip(starts, memory, strict=True))
