"""Break a rank's iteration time down: time in passes, idle time by phase, and idle time by cause.

For every rank, with T the time from the pipeline's first op to its last (the makespan):

    T = starts_after + (forward + backward + wgrad) + idle + ends_before

`idle` is the time between two consecutive ops of the rank, and the bubble of that rank. It is split twice, and each split adds
up to it:

- by phase: *warmup* before the rank's first B (or BW), *cooldown* after its last F, *steady* in between. A gap that is both, as
  with one microbatch, is warmup.
- by cause: *peer*, waiting for a message that its sender had not sent yet, which is what a better schedule can reduce;
  *link*, waiting for a message that was under way; *validate*, waiting for the global gradient statistics that validate the last
  optimistic step; *other*, the rest: the host's own work between ops, and preemption by other processes.

A recording has both, a simulation (which has no waits) only the phases: there the cause of every gap is a peer or a link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.simulate import TimedOp, lengths_ms
from megatron.zerobubble.plan.timeline import Activity, Span, Timeline

Row = Sequence[TimedOp]


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Time of one rank in one iteration, in milliseconds."""

    starts_after_ms: float
    """From the pipeline's first op to this rank's first."""
    ends_before_ms: float
    """From this rank's last op to the pipeline's last."""
    forward_ms: float
    backward_ms: float
    """B, or the fused BW."""
    wgrad_ms: float
    idle_warmup_ms: float
    idle_steady_ms: float
    idle_cooldown_ms: float

    @property
    def idle_ms(self) -> float:
        """The sum over all phases: the rank's bubble."""
        return self.idle_warmup_ms + self.idle_steady_ms + self.idle_cooldown_ms

    @property
    def busy_ms(self) -> float:
        """Time in ops."""
        return self.forward_ms + self.backward_ms + self.wgrad_ms

    @property
    def span_ms(self) -> float:
        """From the rank's first op to its last."""
        return self.busy_ms + self.idle_ms

    @property
    def wgrad_share(self) -> float:
        """W's part of the time in ops; 0 where B and W are fused."""
        return self.wgrad_ms / self.busy_ms if self.busy_ms else 0.0

    def to_json(self) -> dict[str, float]:
        """All of its times by name, for `report.json`."""
        return {**vars(self), "idle_ms": self.idle_ms, "wgrad_share": self.wgrad_share}


@dataclass(frozen=True, kw_only=True)
class RankRecord(RankTime):
    """Recorded time of one rank in one iteration, with what a simulation does not have, in milliseconds."""

    idle_for_peer_ms: float
    idle_for_link_ms: float
    idle_for_validation_ms: float
    idle_other_ms: float
    """The four causes of idle time add up to `idle_ms`."""
    gradients_ms: float
    """Finalizing gradients after the last op."""
    optimizer_ms: float
    """Time in the optimizer; without post-validation it includes waiting for the gradient statistics of all ranks."""
    optimizer_ahead_ms: float
    """How long before the pipeline's last rank this one entered its optimizer: without post-validation at least this much of
    `optimizer_ms` is waiting."""
    rewind_ms: float
    """Forwards that were discarded by a rollback of the last optimistic step; before the ops, and no part of the makespan."""
    exposed_all_to_all_ms: float
    """The part of the time in ops in which tokens travel to or from experts, and the rank computes nothing."""


def rank_times(rows: Sequence[Row]) -> tuple[RankTime, ...]:
    """The time of each rank, from the timed ops of a simulation or a recording. Every rank must have an op."""
    first = min(row[0].start_ms for row in rows)
    last = max(row[-1].end_ms for row in rows)
    return tuple(
        RankTime(
            starts_after_ms=row[0].start_ms - first,
            ends_before_ms=last - row[-1].end_ms,
            forward_ms=_time_in(row, OpKind.F),
            backward_ms=_time_in(row, OpKind.B, OpKind.BW),
            wgrad_ms=_time_in(row, OpKind.W),
            **_phases(row),
        )
        for row in rows
    )


def rank_records(timeline: Timeline) -> tuple[RankRecord, ...]:
    """The recorded time of each rank. The timeline must be on one clock."""
    sent = _sent_at(timeline)
    entered = [[span.start_ms for span in rank.spans if span.activity is Activity.OPTIMIZER] for rank in timeline.ranks]
    latest = max((max(starts) for starts in entered if starts), default=0.0)
    return tuple(
        RankRecord(
            **vars(time),
            **_causes(time, rank.ops, rank.spans, sent),
            gradients_ms=_total(rank.spans, Activity.GRADIENTS),
            optimizer_ms=_total(rank.spans, Activity.OPTIMIZER),
            optimizer_ahead_ms=latest - max(starts) if starts else 0.0,
            rewind_ms=_total(rank.spans, Activity.REWIND),
            exposed_all_to_all_ms=_total(rank.spans, Activity.ALL_TO_ALL),
        )
        for rank, time, starts in zip(timeline.ranks, rank_times(timeline.rows), entered, strict=True)
    )


def link_times(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Estimate the P2P latency of a message on each link, (sender, receiver) -> milliseconds.

    It is the median time from the issue of a send until its receiver continues, over the messages that the receiver was already
    waiting for when they were sent; a link without such a message is left out.
    """
    sent = _sent_at(timeline)
    times: dict[tuple[int, int], list[float]] = {}
    for rank in timeline.ranks:
        for span in rank.spans:
            message = span.message
            if span.activity is Activity.WAIT and message in sent and span.start_ms <= sent[message]:
                times.setdefault((message.source, message.target), []).append(max(0.0, span.end_ms - sent[message]))
    return {link: median(found) for link, found in sorted(times.items())}


def _time_in(row: Row, *kinds: OpKind) -> float:
    return math.fsum(length for timed, length in zip(row, lengths_ms(row), strict=True) if timed.op.kind in kinds)


def _phases(row: Row) -> dict[str, float]:
    first_backward = next((timed.start_ms for timed in row if timed.op.kind in (OpKind.B, OpKind.BW)), row[-1].end_ms)
    last_forward = max((timed.end_ms for timed in row if timed.op.kind is OpKind.F), default=row[-1].end_ms)
    warmup = steady = cooldown = 0.0
    for before, after in pairwise(row):
        gap = max(0.0, after.start_ms - before.end_ms)  # the ops of a pair overlap
        if after.start_ms <= first_backward:
            warmup += gap
        elif before.end_ms >= last_forward:
            cooldown += gap
        else:
            steady += gap
    return {"idle_warmup_ms": warmup, "idle_steady_ms": steady, "idle_cooldown_ms": cooldown}


def _causes(time: RankTime, row: Row, spans: Sequence[Span], sent: Mapping[Message, float]) -> dict[str, float]:
    """Only what lies between the rank's first op and its last counts, so that the causes add up to the phases."""
    first, last = row[0].start_ms, row[-1].end_ms
    peer = link = validate = 0.0
    for span in spans:
        start, end = max(span.start_ms, first), min(span.end_ms, last)
        if end <= start:
            continue
        if span.activity is Activity.VALIDATE:
            validate += end - start
        elif span.activity is Activity.WAIT and span.message is not None:
            left = min(max(sent.get(span.message, end), start), end)
            peer, link = peer + left - start, link + end - left
    other = time.idle_ms - peer - link - validate
    return {
        "idle_for_peer_ms": peer,
        "idle_for_link_ms": link,
        "idle_for_validation_ms": validate,
        "idle_other_ms": other,
    }


def _sent_at(timeline: Timeline) -> dict[Message, float]:
    return {
        span.message: span.start_ms
        for rank in timeline.ranks
        for span in rank.spans
        if span.activity is Activity.SEND and span.message is not None
    }


def _total(spans: Sequence[Span], activity: Activity) -> float:
    return math.fsum(span.end_ms - span.start_ms for span in spans if span.activity is activity)
