"""Plan -> Plan transforms, independent of the schedule. Sends and receives are placed in `communication`.

Every transform only removes ops, rewrites them in place, or moves W, on which no other op depends. No op moves behind an op that
it did not wait for before, so a plan without deadlock stays free of deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Op, OpKind, Passes, Plan
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec


def forward_only(plan: Plan) -> Plan:
    """The plan for evaluation: only its F ops, in the same order. Validate it with ``forward_only=True``."""
    return plan.with_ops([op for op in row if op.kind is OpKind.F] for row in plan.ops)


def first_microbatches(plan: Plan, num_microbatches: int) -> Plan:
    """The plan restricted to its first microbatches.

    Every dependency is within one microbatch, so the remaining ops can run in the same order, and need no more memory at any
    time. Patterns that are defined only for many microbatches are used for few this way.

    Raises:
        PlanError: the plan has fewer microbatches, or assigns those of a whole batch.
    """
    if plan.assignment:
        raise PlanError(f"plan {plan.schedule!r} assigns all microbatches of a batch; it cannot be restricted to the first ones")
    if num_microbatches > plan.num_microbatches:
        raise PlanError(
            f"plan {plan.schedule!r} has {plan.num_microbatches} microbatches; it cannot be restricted to {num_microbatches}"
        )
    rows = tuple(tuple(op for op in row if op.microbatch < num_microbatches) for row in plan.ops)
    counts = plan.slice_counts[:num_microbatches]
    return plan.with_ops(
        rows,
        num_microbatches=num_microbatches,
        num_slices=max(counts, default=plan.num_slices),
        slice_counts=counts,
    )


def recut(plan: Plan, slice_counts: Sequence[int]) -> Plan:
    """The plan of microbatches with these numbers of slices: the k-th op of a stage and kind stays the k-th; others are dropped.

    Every F takes the place of one before it where a B would otherwise come before the F of its own slice: the patterns of equal
    slices need none of that, as B of a pass has the F of as many passes in front of it as a microbatch has slices. A stage moves
    its F by no less than the next one, so that what an F or B needs from another stage still is before it.

    Args:
        plan: a valid plan of at least as many passes, without an assignment.
        slice_counts: slices of every microbatch.
    """
    passes, ahead = Passes(tuple(slice_counts)), [0] * plan.num_stages
    for row in plan.ops:
        begun = Counter[int]()
        for op in row:
            number = plan.passes.number(op)
            begun[op.stage] += op.kind is OpKind.F
            if op.kind in (OpKind.B, OpKind.BW) and number < len(passes):
                own = passes.number(passes.nth(op.stage, op.kind, number)._replace(kind=OpKind.F))
                ahead[op.stage] = max(ahead[op.stage], own + 1 - begun[op.stage])
    ahead = list(accumulate(reversed(ahead), max))[::-1]
    rows = []
    for row, stages in zip(plan.ops, plan.placement.rank_to_stages, strict=True):
        first = [(stage, OpKind.F, number) for stage in stages for number in range(ahead[stage])]
        moved = [(op.stage, op.kind, plan.passes.number(op) + (ahead[op.stage] if op.kind is OpKind.F else 0)) for op in row]
        rows.append(tuple(passes.nth(*which) for which in (*first, *moved) if which[-1] < len(passes)))
    return plan.with_ops(
        rows,
        num_microbatches=len(passes.slices),
        num_slices=max(passes.slices),
        slice_counts=passes.slices,
    )


def split_fused(plan: Plan) -> Plan:
    """The plan with every BW split into B and, directly after it, W, so that the input gradient is sent before W runs."""
    return plan.with_ops([part for op in row for part in _split(op)] for row in plan.ops)


def executed_plan(of: ScheduleSpec | StepCosts, plan: Plan) -> Plan:
    """The plan that training executes: where reductions overlap, the Ws behind the last B are ordered for them."""
    return reductions_beside_tail(plan) if of.overlaps_reductions else plan


def reductions_beside_tail(plan: Plan) -> Plan:
    """The plan with the last Ws of each rank ordered so that reductions over replicas have most work beside them.

    Behind the last B of a rank's first stage to end, and its last F, Ws keep their places and change their order: those of the
    stage that ends first come first, and it is reduced while the others run. The B of stage 0 sends nothing. If it is the rank's
    last op but for Ws it moves to the end, where it and its own W can run layer by layer as the full backward does, unless three
    or more Ws of its stage come behind it: these take longer than B and W.

    Where Ws of the stages of a rank take different times, a B between them may start a little later or earlier.
    """
    return plan.with_ops(_with_stage_0_last(_stages_in_turn(row)) for row in plan.ops)


def _stages_in_turn(row: Sequence[Op]) -> list[Op]:
    ends = {op.stage: index for index, op in enumerate(row) if op.kind in (OpKind.B, OpKind.BW)}
    last_f = max(index for index, op in enumerate(row) if op.kind is OpKind.F)
    begin = max(min(ends.values()), last_f)
    waiting = sorted((op for op in row[begin:] if op.kind is OpKind.W), key=lambda op: ends[op.stage])  # stable within a stage
    place = {op: index for index, op in enumerate(row)}
    result = list(row[:begin])
    for index in range(begin, len(row)):
        op = row[index]
        if op.kind is OpKind.W:  # the first whose B has run
            op = next(each for each in waiting if place[each._replace(kind=OpKind.B)] < index)
            waiting.remove(op)
        result.append(op)
    return result


def _with_stage_0_last(row: Sequence[Op]) -> tuple[Op, ...]:
    num_before = max(index for index, op in enumerate(row) if op.kind is not OpKind.W) + 1
    before, tail = row[:num_before], row[num_before:]
    own = [op for op in tail if op.stage == 0]
    if (before[-1].stage, before[-1].kind) != (0, OpKind.B) or len(own) > 2:
        return tuple(row)
    return *before[:-1], *(op for op in tail if op != own[-1]), before[-1], own[-1]


def _split(op: Op) -> tuple[Op, ...]:
    if op.kind is not OpKind.BW:
        return (op,)
    return op._replace(kind=OpKind.B), op._replace(kind=OpKind.W)
