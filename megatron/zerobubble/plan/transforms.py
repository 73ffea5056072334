"""Plan -> Plan, without knowing schedule names. Communication has a file of its own.

Every pass here only removes or rewrites ops in place, or moves W, for which nobody waits. So what a rank waits for is never put
behind what it did not wait for before: a plan without deadlock stays one.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.ir import Op, OpKind, Plan


def forward_only(plan: Plan) -> Plan:
    """The F ops alone, in the same order: what evaluation runs. Validate it with ``forward_only=True``."""
    return replace(plan, ops=tuple(tuple(op for op in row if op.kind is OpKind.F) for row in plan.ops))


def first_microbatches(plan: Plan, num_microbatches: int) -> Plan:
    """The plan for fewer microbatches that is left when the others are struck out.

    Every dependency is within one microbatch, so what is left can be executed in the order it had, and holds no more
    memory at any time. Patterns that are only drawn for many microbatches serve few this way.
    """
    if num_microbatches > plan.num_microbatches:
        raise PlanError(
            f"plan {plan.schedule!r} has {plan.num_microbatches} microbatches; {num_microbatches} cannot be taken from it"
        )
    rows = tuple(tuple(op for op in row if op.microbatch < num_microbatches) for row in plan.ops)
    return replace(plan, num_microbatches=num_microbatches, ops=rows)


def split_fused(plan: Plan) -> Plan:
    """Every BW as a B and, at once, its W: the same compute order, with the input gradient sent before W runs."""
    return replace(plan, ops=tuple(tuple(part for op in row for part in _split(op)) for row in plan.ops))


def group_weight_gradients(plan: Plan, size: int) -> Plan:
    """The Ws of every `size` microbatches of a stage next to each other, where the last of them was; fused passes are split.

    The groups of a stage are microbatches 0 .. size-1, size .. 2 size-1, ..., the last one possibly smaller (`wgrad_group`). A
    stage holds what at most size - 1 more microbatches keep between B and W, which the simulation of the result counts.
    """
    if size < 1:
        raise PlanError(f"Ws cannot run in groups of {size}; give 1 or more")
    rows = []
    for row in split_fused(plan).ops:
        grouped: list[Op] = []
        held: dict[int, list[Op]] = {}
        for op in row:
            if op.kind is not OpKind.W:
                grouped.append(op)
                continue
            held.setdefault(op.stage, []).append(op)
            if op.microbatch == wgrad_group(op.microbatch, size, plan.num_microbatches)[-1]:
                grouped += held.pop(op.stage)
        rows.append(tuple(grouped))
    return replace(plan, ops=tuple(rows))


def wgrad_group(microbatch: int, size: int, num_microbatches: int) -> range:
    """The microbatches whose Ws run together with that of `microbatch`."""
    first = microbatch - microbatch % size
    return range(first, min(first + size, num_microbatches))


def _split(op: Op) -> tuple[Op, ...]:
    if op.kind is not OpKind.BW:
        return (op,)
    return op._replace(kind=OpKind.B), op._replace(kind=OpKind.W)
