"""Plan -> Plan transforms, independent of the schedule. Sends and receives are placed in `communication`.

Every transform only removes ops, rewrites them in place, or moves W, on which no other op depends. No op moves behind an op that
it did not wait for before, so a plan without deadlock stays free of deadlock.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.ir import Op, OpKind, Plan


def forward_only(plan: Plan) -> Plan:
    """The plan for evaluation: only its F ops, in the same order. Validate it with ``forward_only=True``."""
    return replace(plan, ops=tuple(tuple(op for op in row if op.kind is OpKind.F) for row in plan.ops))


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
    return replace(plan, num_microbatches=num_microbatches, ops=rows)


def split_fused(plan: Plan) -> Plan:
    """The plan with every BW split into B and, directly after it, W, so that the input gradient is sent before W runs."""
    return replace(plan, ops=tuple(tuple(part for op in row for part in _split(op)) for row in plan.ops))


def group_weight_gradients(plan: Plan, size: int) -> Plan:
    """The plan with the Ws of every `size` microbatches of a stage adjacent, at the place of the last of them; BW is split.

    The groups of a stage are microbatches 0 .. size-1, size .. 2 size-1, ..., the last one possibly smaller (`wgrad_group`). A
    stage keeps the operands of W for up to size - 1 more microbatches; simulating the result counts them.

    Raises:
        PlanError: `size` is below 1.
    """
    if size < 1:
        raise PlanError(f"Ws cannot run in groups of {size}; give 1 or more")
    rows = []
    for row in split_fused(plan).ops:
        grouped: list[Op] = []
        waiting: dict[int, list[Op]] = {}
        for op in row:
            if op.kind is not OpKind.W:
                grouped.append(op)
                continue
            waiting.setdefault(op.stage, []).append(op)
            if op.slice == 0 and op.microbatch == wgrad_group(op.microbatch, size, plan.num_microbatches)[-1]:
                grouped += waiting.pop(op.stage)
        rows.append(tuple(grouped))
    return replace(plan, ops=tuple(rows))


def wgrad_group(microbatch: int, size: int, num_microbatches: int) -> range:
    """The microbatches whose Ws run together with the W of `microbatch`."""
    first = microbatch - microbatch % size
    return range(first, min(first + size, num_microbatches))


def _split(op: Op) -> tuple[Op, ...]:
    if op.kind is not OpKind.BW:
        return (op,)
    return op._replace(kind=OpKind.B), op._replace(kind=OpKind.W)
