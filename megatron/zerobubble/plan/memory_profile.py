"""What a rank's activations take, moment by moment: a timeline and costs -> a staircase a rank.

F takes a stage's activation when it starts, B gives back all but `activation_after_backward` when it ends, W the rest when it
ends, and BW both. The highest step is the simulator's peak (`simulate.peak_memory`), in the same unit: 1.0 is 1F1B's rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.simulate import TimedOp

Stair = tuple[tuple[float, float], ...]
"""(moment in milliseconds, held from then on), ascending."""


def held_over_time(rows: Sequence[Sequence[TimedOp]], num_microbatches: int, costs: CostModel) -> tuple[Stair, ...]:
    """Per rank what it holds, a step an op, in the order of the ops; of a simulation or a recording with backward passes."""
    unit = min(len(rows), num_microbatches)
    return tuple(_stair(row, costs, unit) for row in rows)


def _stair(row: Sequence[TimedOp], costs: CostModel, unit: int) -> Stair:
    """Counts held passes per stage, not a running float sum, as the simulator does."""
    stages = sorted({timed.op.stage for timed in row})
    before, after = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    steps = []
    for (stage, kind, _), start, end in row:
        before[stage] += 1 if kind is OpKind.F else -1 if kind in (OpKind.B, OpKind.BW) else 0
        after[stage] += 1 if kind is OpKind.B else -1 if kind is OpKind.W else 0
        held = math.fsum(before[s] * costs.activation[s] + after[s] * costs.activation_after_backward[s] for s in stages)
        steps.append((start if kind is OpKind.F else end, held / unit))
    return tuple(steps)
