"""Timelines of an iteration: ops plus transfers, waits, gradient reduction and the optimizer.

Like `TimedOp`, they describe simulations and recordings alike; the renderers treat both the same way.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.costs.cost_model import Activations
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.simulate import Simulation, TimedOp


class Activity(enum.Enum):
    """The kind of a span, which is anything on a timeline except an op."""

    SEND = "send"
    """From the issue of a send until it is retired: an upper bound of its transfer time."""
    RECEIVE = "recv"
    """From the posting of a receive until its op takes the message; most of it overlaps with other ops."""
    WAIT = "wait"
    """The rank is idle because the message for its next op has not arrived."""
    VALIDATE = "validate"
    """Post-validation only: receiving the global gradient statistics of the previous step, and zeroing gradients."""
    REWIND = "rewind"
    """Forwards that ran with weights that were rolled back, up to where the iteration starts again."""
    GRADIENTS = "gradients"
    """Finalizing gradients after the last op: data-parallel reduction, all-reduce of tied embeddings."""
    OPTIMIZER = "optimizer"
    """The optimizer step; without post-validation this includes waiting for the gradient statistics of all ranks."""
    REDUCE = "reduce"
    """All-reduce or reduce-scatter of a gradient bucket over the data-parallel ranks, from its issue to its completion, or to the
    wait for it if completion cannot be observed."""
    GATHER = "gather"
    """All-gather of a weight bucket over the data-parallel ranks, from its issue to its completion or the wait for it."""
    ALL_TO_ALL = "exposed all-to-all"
    """Inside of ops: tokens travel to or from experts, and the rank computes nothing meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A DDP bucket: parameters of one stage that the data-parallel ranks communicate together."""

    stage: int
    index: int
    """Index within the stage. Buckets are in reverse order of the model: 0 has its last layers."""
    num_bytes: int
    """Size of the whole bucket, padding included."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Anything on a timeline except an op, in milliseconds on the same clock as the ops."""

    activity: Activity
    start_ms: float
    end_ms: float
    message: Message | None = None
    """For SEND, RECEIVE and WAIT: the message."""
    bucket: Bucket | None = None
    """For REDUCE and GATHER: the bucket."""

    @property
    def text(self) -> str:
        """Its activity, with the bucket if it has one."""
        if self.bucket is None:
            return self.activity.value
        return f"{self.activity.value} bucket {self.bucket.index} of stage {self.bucket.stage}"


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's ops and spans in one iteration."""

    ops: tuple[TimedOp, ...]
    """In the order they ran."""
    spans: tuple[Span, ...] = ()
    """In the order they ended."""
    peak_bytes: int | None = None
    """Peak allocated memory of the rank's device up to the end of the iteration; None if it is not counted, and in iterations
    with profiled passes, which reset the device's peak counter."""
    host: str = ""
    """Name of its host, if known."""

    def shifted(self, by_ms: float) -> RankTimeline:
        """The timeline with `by_ms` added to every time."""
        return replace(
            self,
            ops=tuple(TimedOp(op, start + by_ms, end + by_ms) for op, start, end in self.ops),
            spans=tuple(replace(span, start_ms=span.start_ms + by_ms, end_ms=span.end_ms + by_ms) for span in self.spans),
        )


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All ranks of a pipeline in one iteration, on one clock."""

    iteration: int
    """Iteration number as in progress lines, from 1."""
    plan: Plan
    ranks: tuple[RankTimeline, ...]
    activations: Activations | None = None
    """Activation memory per stage as measured in the run; None: not measured."""

    @staticmethod
    def planned(simulation: Simulation) -> Timeline:
        """A simulated plan as a first iteration, in which nothing but its ops is seen."""
        return Timeline(iteration=1, plan=simulation.plan, ranks=tuple(RankTimeline(ops=row) for row in simulation.rows))

    @property
    def rows(self) -> Sequence[Sequence[TimedOp]]:
        """The ops alone, per rank."""
        return tuple(rank.ops for rank in self.ranks)

    @property
    def begin_ms(self) -> float:
        """Start of the first op over all ranks."""
        return min(row[0].start_ms for row in self.rows if row)

    @property
    def extent_ms(self) -> tuple[float, float]:
        """Earliest start and latest end of all ops and spans."""
        times = [(op.start_ms, op.end_ms) for rank in self.ranks for op in rank.ops]
        times += [(span.start_ms, span.end_ms) for rank in self.ranks for span in rank.spans]
        return min(start for start, _ in times), max(end for _, end in times)
