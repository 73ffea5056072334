"""All schedule families, and changes that break a program's transfers on purpose.

Standard library only, like the plans: tests check that the model of links and real process groups detect them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron.zerobubble.plan.communication import Message, Program, Step
from megatron.zerobubble.plan.registry import known_schedules

FAMILIES = [info.name for info in known_schedules()]


def rewrite(program: Program, change: Callable[[int, list[Step]], list[Step]]) -> Program:
    """The program with every rank's steps changed."""
    return replace(program, steps=tuple(tuple(change(rank, list(row))) for rank, row in enumerate(program.steps)))


def post_at_take(_: int, row: list[Step]) -> list[Step]:
    """Against rule 1: receives are posted in the order in which they are taken, and not in that of the sends."""
    return [replace(step, post=step.take) for step in row]


def post_one_later(_: int, row: list[Step]) -> list[Step]:
    """Against rule 2, without lookahead: a receive is posted after the op that takes it."""
    late: tuple[Message, ...] = ()
    for index, step in enumerate(row):
        row[index] = replace(step, post=late)
        late = step.post
    return row
