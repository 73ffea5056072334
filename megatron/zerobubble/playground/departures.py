"""Where reality left the plan: a recorded iteration op by op against a simulated one.

Both begin with their first op. How late a rank is changes at an op for one of two reasons: the pass took longer than planned, or
the rank stood still longer before it. What a rank loses in all is the sum of both over its ops; what a late start of one rank
costs others is in their waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.ir import Op, Plan
from megatron.zerobubble.plan.simulate import Simulation, TimedOp
from megatron.zerobubble.plan.timeline import Timeline

_MOST = 12
"""Departures listed."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """One op at which a rank lost time. Milliseconds."""

    rank: int
    step: int
    """Of the recorded row."""
    op: Op
    planned_start_ms: float
    start_ms: float
    """Both from the first op of all."""
    longer_pass_ms: float
    longer_wait_ms: float

    @property
    def lost_ms(self) -> float:
        """By how much more the rank is late after the op than before it."""
        return self.longer_pass_ms + self.longer_wait_ms


@dataclass(frozen=True, kw_only=True)
class RankDeparture:
    """One rank. Milliseconds; negative where it was faster than planned."""

    longer_passes_ms: float
    longer_waits_ms: float
    """The start of its first op included."""
    first_other_step: int | None
    """The first step at which it ran another op than planned; None where the order was the plan's."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What became of a plan."""

    ranks: tuple[RankDeparture, ...]
    largest: tuple[Departure, ...]
    """Those at which most was lost, the largest first."""


def compare(planned: Simulation, recorded: Timeline) -> Comparison:
    """Raises PlanError where the two do not have the same ops on the same ranks."""
    _check_alike(planned.plan, recorded.plan)
    begin = min(row[0].start_ms for row in planned.rows if row)
    ranks, all_of_them = [], []
    for rank, (row, ran) in enumerate(zip(planned.rows, recorded.rows, strict=True)):
        found = _departures(rank, row, ran, begin, recorded.begin_ms)
        all_of_them += found
        others = (step for step, (a, b) in enumerate(zip(row, ran, strict=True)) if a.op != b.op)
        ranks.append(
            RankDeparture(
                longer_passes_ms=sum(each.longer_pass_ms for each in found),
                longer_waits_ms=sum(each.longer_wait_ms for each in found),
                first_other_step=next(others, None),
            )
        )
    largest = nlargest(_MOST, (each for each in all_of_them if each.lost_ms > 0), key=lambda each: each.lost_ms)
    return Comparison(ranks=tuple(ranks), largest=tuple(largest))


def _check_alike(plan: Plan, ran: Plan) -> None:
    for name, ours, theirs in (
        ("ranks", plan.num_ranks, ran.num_ranks),
        ("microbatches", plan.num_microbatches, ran.num_microbatches),
        ("stages", plan.num_stages, ran.num_stages),
    ):
        if ours != theirs:
            raise PlanError(f"the plan has {ours} {name} and the trace {theirs}: open the plan of this run to compare them")
    for rank, (row, other) in enumerate(zip(plan.ops, ran.ops, strict=True)):
        if set(row) != set(other):
            odd = sorted(map(str, set(row) ^ set(other)))
            raise PlanError(
                f"on rank {rank} plan and trace do not have the same passes ({', '.join(odd[:4])} is in one only): "
                "open the plan of this run to compare them"
            )


def _departures(
    rank: int, row: Sequence[TimedOp], ran: Sequence[TimedOp], begin: float, recorded_begin: float
) -> list[Departure]:
    planned = {timed.op: timed for timed in row}
    waits = _waits(row, begin)
    real_waits = _waits(ran, recorded_begin)
    return [
        Departure(
            rank=rank,
            step=step,
            op=timed.op,
            planned_start_ms=planned[timed.op].start_ms - begin,
            start_ms=timed.start_ms - recorded_begin,
            longer_pass_ms=_length(timed) - _length(planned[timed.op]),
            longer_wait_ms=real_waits[timed.op] - waits[timed.op],
        )
        for step, timed in enumerate(ran)
    ]


def _waits(row: Sequence[TimedOp], begin: float) -> dict[Op, float]:
    """Before each op, how long the rank stood still; before its first, since the first of all ranks."""
    ends = [begin, *(timed.end_ms for timed in row)]
    return {timed.op: timed.start_ms - end for timed, end in zip(row, ends, strict=False)}


def _length(timed: TimedOp) -> float:
    return timed.end_ms - timed.start_ms
