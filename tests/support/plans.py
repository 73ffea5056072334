"""Plans as text, and valid plans that differ a little."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.communication import Program
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.validate import validate

__all__ = ["paired", "plan_of_text", "receive_buffers", "reordered", "text_of"]


def text_of(plan: Plan) -> str:
    """One line per rank, ops separated by one space."""
    return "\n".join(" ".join(map(str, row)) for row in plan.ops)


def plan_of_text(text: str, *, schedule: str, placement: Placement, num_microbatches: int) -> Plan:
    """The plan of such lines."""
    rows = [[Op.parse(word) for word in line.split()] for line in text.strip().splitlines()]
    return Plan.of(schedule, placement, num_microbatches, rows)


def reordered(plan: Plan) -> Plan:
    """The same plan with one op of its first rank at another place.

    Under V this is an F of the first stage that changes places with a B of the last one: both send to the next rank.
    """
    for row in (*_moved(plan.ops[0], plan.num_stages - 1), *_swapped(plan.ops[0])):
        other = replace(plan, ops=(row, *plan.ops[1:]))
        try:
            validate(other)
        except PlanError:
            continue
        return other
    raise AssertionError(f"no other order of rank 0 is valid: {plan}")


def _moved(row: tuple[Op, ...], last_stage: int) -> Iterator[tuple[Op, ...]]:
    """Each F of stage 0 at the place of each B of the last stage."""
    for forward in (op for op in row if (op.stage, op.kind) == (0, OpKind.F)):
        for place in (at for at, op in enumerate(row) if (op.stage, op.kind) == (last_stage, OpKind.B)):
            others = [op for op in row if op != forward]
            yield (*others[:place], forward, *others[place:])


def _swapped(row: tuple[Op, ...]) -> Iterator[tuple[Op, ...]]:
    for at in range(len(row) - 1):
        yield (*row[:at], row[at + 1], row[at], *row[at + 2 :])


def paired(plan: Plan, choice: random.Random | None = None, *, share: float = 1.0) -> Plan:
    """The plan with its adjacent F and B or BW of different microbatches as pairs, as long as no rank waits forever.

    Args:
        plan: a valid plan.
        choice: the order in which pairs are tried, and which; None: all, from the first rank and step on.
        share: of them that are tried.
    """
    couples = [couple for row in plan.ops for couple in pairwise(row)]
    tried = [one for one, other in couples if one.kind is OpKind.F and other.kind in (OpKind.B, OpKind.BW)]
    if choice is not None:
        tried = choice.sample(tried, round(share * len(tried)))
    for op in tried:
        more = replace(plan, pairs=plan.pairs | {op})
        with suppress(PlanError):
            validate(more)
            plan = more
    return plan


def receive_buffers(program: Program) -> tuple[int, ...]:
    """Per rank the largest number of receives posted and not yet taken, the taking op's own included."""
    peaks = []
    for steps in program.steps:
        taken = accumulate((len(step.take) for step in steps), initial=0)
        posted = accumulate(len(step.post) for step in steps)
        peaks.append(max(map(operator.sub, posted, taken), default=0))
    return tuple(peaks)
