"""What a rank did and when, beside its ops: transfers, waiting, and what comes before and after the passes.

Like `TimedOp` it serves simulations and recordings alike, and pictures draw it without knowing where it comes from.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.simulate import TimedOp


class Activity(enum.Enum):
    """What fills a span."""

    SEND = "send"
    """From the issue of a send until it is retired: at most how long it travelled."""
    RECEIVE = "recv"
    """From the posting of a receive until its op took it, most of which overlaps with other ops."""
    WAIT = "wait"
    """The rank stood still because the message for its next op was not there."""
    VALIDATE = "validate"
    """The truth about the step before is asked for, and gradients are zeroed (steps taken early only)."""
    REWIND = "rewind"
    """Forwards that ran with wrong weights and were given up, up to where they begin again."""
    GRADIENTS = "gradients"
    """Gradients are made final after the last op: reduced over data-parallel ranks, tied embeddings summed."""
    OPTIMIZER = "optimizer"
    """The optimizer steps; where steps are not taken early this includes waiting for all ranks' statistics."""
    REDUCE = "reduce"
    """A bucket of gradients is reduced over the data-parallel ranks, from its issue until it is over; where only waiting
    for it can tell, until it was waited for."""
    GATHER = "gather"
    """A bucket of weights is gathered from the data-parallel ranks, likewise."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters of one stage that the data-parallel ranks exchange together."""

    stage: int
    index: int
    """Within the stage. Buckets are in reverse order of the model: 0 holds its last layers."""
    num_bytes: int
    """Of the whole bucket, padding included."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something other than an op, in milliseconds on the clock of the ops beside it."""

    activity: Activity
    start_ms: float
    end_ms: float
    message: Message | None = None
    """What travels or is waited for."""
    bucket: Bucket | None = None
    """What is reduced or gathered."""


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank in one iteration."""

    ops: tuple[TimedOp, ...]
    """In the order they ran."""
    spans: tuple[Span, ...] = ()
    """In the order they ended."""
    peak_bytes: int | None = None
    """Most memory that the rank's device held up to the end of the iteration, of everything; None where nobody counts it, and in
    iterations in which passes are measured, which begin the device's count anew."""

    def shifted(self, by_ms: float) -> RankTimeline:
        """The same on a clock that shows `by_ms` more."""
        return RankTimeline(
            ops=tuple(TimedOp(op, start + by_ms, end + by_ms) for op, start, end in self.ops),
            spans=tuple(replace(span, start_ms=span.start_ms + by_ms, end_ms=span.end_ms + by_ms) for span in self.spans),
            peak_bytes=self.peak_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All ranks of a pipeline in one iteration, on one clock."""

    iteration: int
    """As in progress lines, from 1."""
    plan: Plan
    ranks: tuple[RankTimeline, ...]

    @property
    def rows(self) -> Sequence[Sequence[TimedOp]]:
        """The ops alone, per rank."""
        return tuple(rank.ops for rank in self.ranks)

    @property
    def begin_ms(self) -> float:
        """When the first op of all starts."""
        return min(row[0].start_ms for row in self.rows if row)

    @property
    def extent_ms(self) -> tuple[float, float]:
        """Earliest start and latest end of all ops and spans."""
        times = [(op.start_ms, op.end_ms) for rank in self.ranks for op in rank.ops]
        times += [(span.start_ms, span.end_ms) for rank in self.ranks for span in rank.spans]
        return min(start for start, _ in times), max(end for _, end in times)
