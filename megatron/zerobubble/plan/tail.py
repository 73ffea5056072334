"""How the last Ws of a rank run where gradients are reduced over replicas beside them, and when the reductions are over.

Run one after another, all but the last Ws of a stage complete no gradient, and every bucket is reduced beside that last W, or
after it. So behind the last B of a stage its Ws run weight by weight (`WeightGradStore.run_together`), in the order of DDP's
buckets: these become final all along the tail. Each weight still adds its microbatches in ascending order, to the same bits.

Nothing waits for the B of stage 0. Where it and its W are a rank's last ops, they run as the full backward does, layer by layer,
and each weight is reported when autograd has come to it. `plan.transforms.reductions_beside_tail` orders the ops for both.

A rank reduces one bucket after another, each as soon as it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Op, OpKind

__all__ = ["Tail", "complete_in", "final_ops", "reduced_ms", "tail_of"]

_Row = Sequence[tuple[Op, float, float]]
"""A rank's ops in their order, each with its start and end (`TimedOp`)."""


@dataclass(frozen=True)
class Tail:
    """The last Ws of a rank that do not run one by one; by default none."""

    fused: Op | None = None
    """The B that runs with its W as one full backward."""
    done: Op | None = None
    """That W: nothing is left for it."""
    parts: Mapping[Op, tuple[tuple[Op, ...], int]] = field(default_factory=dict)
    """W -> the Ws that it runs a part of, and which part."""


def tail_of(row: Sequence[Op]) -> Tail:
    """The tail of a rank that runs these ops."""
    fused = done = None
    if len(row) > 1 and row[-2].stage == 0 and row[-2].kind is OpKind.B and row[-1] == row[-2]._replace(kind=OpKind.W):
        fused, done = row[-2:]
    last = {op.stage: index for index, op in enumerate(row) if op.kind is OpKind.B}
    parts = {}
    for stage, begin in last.items():
        ops = tuple(op for op in row[begin:] if op.stage == stage and op.kind is OpKind.W)
        if len(ops) > 1:
            parts.update({op: (ops, part) for part, op in enumerate(ops)})
    return Tail(fused, done, parts)


def final_ops(ops: Sequence[Op], stage: int, tail: Tail) -> list[Op]:
    """The ops of a rank along which the gradients of a stage become final, in their order.

    Args:
        ops: of the rank.
        stage: one of its stages.
        tail: of the rank; an empty one where Ws run one by one.
    """
    last = next(op for op in reversed(ops) if op.stage == stage and op.kind in (OpKind.W, OpKind.BW))
    if tail.fused is not None and tail.fused.stage == stage:
        return [tail.fused, last]
    return list(tail.parts.get(last, ((last,), 0))[0])


def complete_in(row: _Row, stage: int, buckets: Sequence[float], tail: Tail) -> list[tuple[Op, float]]:
    """For each bucket of a stage, the op in which it becomes complete, and after how many milliseconds of it.

    Buckets become complete evenly along `final_ops`.

    Args:
        row: the rank's ops.
        stage: one of its stages.
        buckets: their sizes, in any unit.
        tail: of the rank; an empty one where Ws run one by one.
    """
    finals = final_ops([op for op, _, _ in row], stage, tail)
    times = [(op, end - start) for op, start, end in row if op in finals]
    whole, size, found = math.fsum(time for _, time in times), math.fsum(buckets), []
    for complete in accumulate(buckets):
        left, index = (complete / size if size > 0 else 1.0) * whole, 0
        while index < len(times) - 1 and left > times[index][1]:
            left -= times[index][1]
            index += 1
        found.append((times[index][0], min(left, times[index][1])))
    return found


def reduced_ms(row: _Row, step: StepCosts, tail: Tail | None = None) -> float:
    """When a rank has run its ops and reduced all of its buckets, on the clock of its ops; 0 without any op.

    Args:
        row: the rank's ops.
        step: times of its buckets.
        tail: how its last Ws run; None: as where reductions run beside them.
    """
    if not row:
        return 0.0
    ops, end = [op for op, _, _ in row], row[-1][2]
    if tail is None:
        tail = tail_of(ops)
    start_of, complete = {op: start for op, start, _ in row}, list[tuple[float, float]]()
    for stage in dict.fromkeys(op.stage for op in ops if op.kind in (OpKind.W, OpKind.BW)):
        buckets = step.reduce_ms[stage]
        for (op, after), takes in zip(complete_in(row, stage, buckets, tail), buckets, strict=True):
            if takes > 0:
                complete.append((start_of[op] + after if step.beside_passes else end, takes))
    free = 0.0
    for ready, takes in sorted(complete):
        free = max(free, ready) + takes
    return max(end, free)
