"""Write timelines in the trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A rank is a process of the trace. Its first thread has the passes and the waits between them, a pair as one pass below the
other, the second the optimizer and post-validation. Sends, receives, the communication of buckets, and exposed all-to-alls of
experts overlap, so they are distributed over several threads such that no two events of a thread overlap. An arrow leads from
every send to its receive. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.timeline import Activity, RankTimeline, Span, Timeline

Event = dict[str, Any]

_PASSES, _AROUND = 0, 1
_LANES = {Activity.SEND: 100, Activity.RECEIVE: 200, Activity.REDUCE: 300, Activity.GATHER: 400, Activity.ALL_TO_ALL: 500}
"""The first thread id of each overlapping activity."""


def render_trace(timelines: Sequence[Timeline]) -> str:
    """JSON trace of iterations; time begins with the first event."""
    if not timelines:
        return _document([])
    num_ranks = timelines[0].plan.num_ranks
    begin = min(timeline.extent_ms[0] for timeline in timelines)
    events: list[Event] = [_name("process", num_ranks, 0, "iterations", -1)]
    lanes: dict[int, dict[Activity, int]] = {rank: dict.fromkeys(_LANES, 0) for rank in range(num_ranks)}
    thread, until = 0, begin
    for timeline in timelines:
        start, end = timeline.extent_ms
        thread = 1 - thread if start < until else 0  # a rank may begin an iteration while another one ends the last
        until = end
        events.append(_iteration(timeline, num_ranks, thread, begin))
        for rank, own in enumerate(timeline.ranks):
            events += _passes(timeline.iteration, rank, own, begin)
            for activity in _LANES:
                transfers, used = _transfers(timeline.iteration, rank, own, activity, begin)
                lanes[rank][activity] = max(lanes[rank][activity], used)
                events += transfers
    for rank in range(num_ranks):
        events.append(_name("process", rank, 0, f"rank {rank}", rank))
        events.append(_name("thread", rank, _PASSES, "passes", _PASSES))
        events.append(_name("thread", rank, _AROUND, "optimizer and validation", _AROUND))
        for activity, first in _LANES.items():
            events += [_name("thread", rank, first + lane, activity.value, first + lane) for lane in range(lanes[rank][activity])]
    return _document(events)


def _iteration(timeline: Timeline, pid: int, thread: int, begin: float) -> Event:
    start, end = timeline.extent_ms
    text = f"iteration {timeline.iteration}"
    measured = timeline.activations or {}
    return _complete(text, "iteration", pid, thread, start - begin, end - start, schedule=timeline.plan.schedule, **measured)


def _passes(iteration: int, rank: int, own: RankTimeline, begin: float) -> list[Event]:
    """Events of the two threads without overlap: the passes, and the optimizer with post-validation."""
    events = []
    for op, start, end in own.ops:
        args = {"stage": op.stage, "microbatch": op.microbatch, "iteration": iteration}
        if op.slice:
            args["slice"] = op.slice
        events.append(_complete(str(op), op.kind.value, rank, _PASSES, start - begin, end - start, **args))
    for span in own.spans:
        if span.activity not in _LANES:
            thread = _PASSES if span.activity is Activity.WAIT else _AROUND
            events.append(_span(span, span.text, iteration, rank, thread, begin))
    return events


def _transfers(iteration: int, rank: int, own: RankTimeline, activity: Activity, begin: float) -> tuple[list[Event], int]:
    """Events of one activity, each on the first lane that is free when it starts, and the number of lanes used.

    A message gets its end of the arrow.
    """
    events: list[Event] = []
    busy_until: list[float] = []
    for span in sorted((span for span in own.spans if span.activity is activity), key=lambda span: span.start_ms):
        lane = next((lane for lane, until in enumerate(busy_until) if until <= span.start_ms), len(busy_until))
        busy_until[lane:] = [span.end_ms, *busy_until[lane + 1 :]]
        tid = _LANES[activity] + lane
        name = span.text if span.message is None else _text(span.message)
        events.append(_span(span, name, iteration, rank, tid, begin))
        if span.message is None:
            continue
        is_send = activity is Activity.SEND
        at_ms = span.start_ms if is_send else span.end_ms
        events.append(_arrow("transfer", f"{iteration}/{name}", rank, tid, at_ms - begin, is_begin=is_send))
    return events, len(busy_until)


def _arrow(name: str, identity: str, pid: int, tid: int, at_ms: float, *, is_begin: bool) -> Event:
    """One end of an arrow, at the event that encloses it."""
    end = {"name": name, "cat": name, "ph": "s" if is_begin else "f", "id": identity, "pid": pid, "tid": tid, "ts": at_ms * 1e3}
    return end if is_begin else end | {"bp": "e"}


def _span(span: Span, name: str, iteration: int, rank: int, tid: int, begin: float) -> Event:
    args: dict[str, object] = {"iteration": iteration}
    if span.message is not None:
        message = span.message
        args |= {"payload": message.payload.value, "stage": message.stage, "microbatch": message.microbatch}
        args |= {"from_rank": message.source, "to_rank": message.target}
    if span.bucket is not None:
        args |= {"stage": span.bucket.stage, "bucket": span.bucket.index, "bytes": span.bucket.num_bytes}
    return _complete(name, span.activity.value, rank, tid, span.start_ms - begin, span.end_ms - span.start_ms, **args)


def _text(message: Message) -> str:
    return message.where.removeprefix("the ")


def _complete(name: str, cat: str, pid: int, tid: int, start_ms: float, duration_ms: float, **args: object) -> Event:
    times = {"ts": start_ms * 1e3, "dur": duration_ms * 1e3}
    return {"name": name, "cat": cat, "ph": "X", "pid": pid, "tid": tid, **times, "args": args}


def _name(what: str, pid: int, tid: int, name: str, order: int) -> Event:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name, "sort_index": order}}


def _document(events: Sequence[Event]) -> str:
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
