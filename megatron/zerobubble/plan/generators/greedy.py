"""A deterministic list scheduler on a clock where F, B and W take one tick each and links are free.

For memory limits without a hand-written pattern. At each tick every rank runs the first of these that is ready: B, F (while
fewer than `max_pending` microbatches are between their F and their W), W. It never deadlocks: the oldest pending
microbatch can always proceed.
"""

from __future__ import annotations

from megatron.zerobubble.plan.dependencies import requirements
from megatron.zerobubble.plan.ir import Op, OpKind, Passes, Placement, Plan

_PRIORITY = (OpKind.B, OpKind.F, OpKind.W)


def greedy_plan(schedule: str, placement: Placement, num_microbatches: int, *, max_pending: int, num_slices: int = 1) -> Plan:
    """Schedule a placement with one stage per rank, with at most `max_pending` >= 1 microbatches between F and W per rank.

    With slices, with at most this number of slices, and the n-1 other ones of a microbatch.
    """
    passes = Passes((num_slices,) * num_microbatches)
    rows: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    upcoming = [dict.fromkeys(_PRIORITY, 0) for _ in rows]
    ended_before: set[Op] = set()
    while any(counts[OpKind.W] < len(passes) for counts in upcoming):
        chosen: list[Op] = []
        for stage, rank in enumerate(placement.stage_to_rank):
            counts = upcoming[rank]
            for kind in _PRIORITY:
                if counts[kind] == len(passes):
                    continue
                op = passes.nth(stage, kind, counts[kind])
                if not ended_before.issuperset(requirements(op, placement.num_stages)):
                    continue
                if kind is OpKind.F and counts[OpKind.F] - counts[OpKind.W] == max_pending + num_slices - 1:
                    continue
                counts[kind] += 1
                rows[rank].append(op)
                chosen.append(op)
                break
        ended_before.update(chosen)
    return Plan.of(schedule, placement, num_microbatches, rows, num_slices=num_slices)
