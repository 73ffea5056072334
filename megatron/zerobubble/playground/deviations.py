"""Measured vs. planned: compare a recorded iteration op by op with a simulated one.

Both begin with their first op. A rank falls behind its plan at an op for one of two reasons: the pass took longer than planned,
or the rank waited longer before it. The time a rank loses is the sum of both over its ops; the delay that one rank causes on
others shows in their waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.ir import Op, Plan
from megatron.zerobubble.plan.simulate import Simulation, TimedOp
from megatron.zerobubble.plan.timeline import Timeline

_MOST = 12
"""Maximum number of deviations listed."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One op of a recorded iteration compared with its plan. Times in milliseconds."""

    rank: int
    step: int
    """Index of the op in the recorded order of its rank."""
    op: Op
    planned_start_ms: float
    start_ms: float
    """Like `planned_start_ms` counted from the first op of all ranks."""
    longer_pass_ms: float
    longer_wait_ms: float

    @property
    def lost_ms(self) -> float:
        """Time the rank lost at this op: the increase of its delay against the plan."""
        return self.longer_pass_ms + self.longer_wait_ms


@dataclass(frozen=True, kw_only=True)
class RankDeviation:
    """One rank compared with its plan. Times in milliseconds, negative if it was faster than planned."""

    longer_passes_ms: float
    longer_waits_ms: float
    """Including the wait before its first op."""
    first_other_step: int | None
    """The first step at which it ran another op than planned; None if it ran in the plan's order."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A recorded iteration compared with its plan."""

    ranks: tuple[RankDeviation, ...]
    largest: tuple[Deviation, ...]
    """The ops at which most time was lost, the largest loss first."""


def compare(planned: Simulation, recorded: Timeline) -> Comparison:
    """Compare a recorded iteration with a simulated plan.

    Raises:
        PlanError: the two do not have the same ops on the same ranks.
    """
    _check_alike(planned.plan, recorded.plan)
    begin = min(row[0].start_ms for row in planned.rows if row)
    ranks, deviations = [], []
    for rank, (row, ran) in enumerate(zip(planned.rows, recorded.rows, strict=True)):
        found = _deviations(rank, row, ran, begin, recorded.begin_ms)
        deviations += found
        others = (step for step, (a, b) in enumerate(zip(row, ran, strict=True)) if a.op != b.op)
        ranks.append(
            RankDeviation(
                longer_passes_ms=math.fsum(each.longer_pass_ms for each in found),
                longer_waits_ms=math.fsum(each.longer_wait_ms for each in found),
                first_other_step=next(others, None),
            )
        )
    largest = nlargest(_MOST, (each for each in deviations if each.lost_ms > 0), key=lambda each: each.lost_ms)
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


def _deviations(
    rank: int, row: Sequence[TimedOp], ran: Sequence[TimedOp], begin: float, recorded_begin: float
) -> list[Deviation]:
    planned = {timed.op: timed for timed in row}
    waits = _waits(row, begin)
    real_waits = _waits(ran, recorded_begin)
    return [
        Deviation(
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
    """How long the rank waited before each op; before its first one, since the first op of all ranks."""
    ends = [begin, *(timed.end_ms for timed in row)]
    return {timed.op: timed.start_ms - end for timed, end in zip(row, ends, strict=False)}


def _length(timed: TimedOp) -> float:
    return timed.end_ms - timed.start_ms
