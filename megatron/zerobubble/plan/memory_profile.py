"""Activation memory over time: a timeline and costs -> a step function per rank.

F allocates a stage's activation when it starts; B frees all but `activation_after_backward` when it ends, W the rest when it
ends, and BW both. The highest step is the simulator's peak (`simulate.peak_memory`), in the same unit: 1.0 is 1F1B's rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.simulate import TimedOp

Stair = tuple[tuple[float, float], ...]
"""A step function as (time in milliseconds, activation memory from then on), in ascending time."""


def activation_memory_over_time(rows: Sequence[Sequence[TimedOp]], num_microbatches: int, costs: CostModel) -> tuple[Stair, ...]:
    """Activation memory per rank, with one step per op in the order of the ops; 1.0 is 1F1B's rank 0.

    Args:
        rows: the timed ops per rank, simulated or recorded, with backward passes.
        num_microbatches: m.
        costs: activation memory per stage.
    """
    unit = min(len(rows), num_microbatches)
    return tuple(_stair(row, costs, unit) for row in rows)


def _stair(row: Sequence[TimedOp], costs: CostModel, unit: int) -> Stair:
    """One rank's steps. Counts passes per stage instead of a running float sum, as the simulator does."""
    stages = sorted({timed.op.stage for timed in row})
    before, after = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    steps = []
    for (stage, kind, _), start, end in row:
        before[stage] += 1 if kind is OpKind.F else -1 if kind in (OpKind.B, OpKind.BW) else 0
        after[stage] += 1 if kind is OpKind.B else -1 if kind is OpKind.W else 0
        memory = math.fsum(before[s] * costs.activation[s] + after[s] * costs.activation_after_backward[s] for s in stages)
        steps.append((start if kind is OpKind.F else end, memory / unit))
    return tuple(steps)
