"""Data-parallel communication of buckets, in the trace and in the picture."""

from __future__ import annotations

import json

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.render.svg import Panel, render_svg
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import Activity, Bucket, RankTimeline, Span, Timeline

PLAN = build_plan("zb-h1", num_ranks=2, num_microbatches=2)
SIMULATION = simulate(PLAN, CostModel.uniform(PLAN.placement))


def _timeline() -> Timeline:
    """Three buckets of rank 0: the second starts while the first is in flight, the third after both have ended."""
    times = [(Activity.REDUCE, 0, 5.0, 8.0), (Activity.REDUCE, 1, 6.0, 9.0), (Activity.REDUCE, 2, 9.0, 10.0)]
    times.append((Activity.GATHER, 2, 0.0, 1.0))
    spans = tuple(
        Span(activity=activity, start_ms=start, end_ms=end, bucket=Bucket(stage=0, index=index, num_bytes=512))
        for activity, index, start, end in times
    )
    ranks = [RankTimeline(ops=row, spans=spans if rank == 0 else ()) for rank, row in enumerate(SIMULATION.rows)]
    return Timeline(iteration=3, plan=PLAN, ranks=tuple(ranks))


def test_overlapping_buckets_lie_on_lanes_of_their_own() -> None:
    events = json.loads(render_trace([_timeline()]))["traceEvents"]
    reduced = [event for event in events if event.get("cat") == "reduce"]
    assert [(event["name"], event["tid"], event["args"]["bytes"]) for event in reduced] == [
        ("reduce bucket 0 of stage 0", 300, 512),
        ("reduce bucket 1 of stage 0", 301, 512),
        ("reduce bucket 2 of stage 0", 300, 512),
    ]
    assert [event["tid"] for event in events if event.get("cat") == "gather"] == [400]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
    assert {"reduce", "gather"} <= names


def test_the_picture_has_a_bar_for_each_under_the_row() -> None:
    picture = render_svg([Panel.of_ops(SIMULATION.rows, caption="planned"), Panel(caption="measured", ranks=_timeline().ranks)])
    assert picture.count("<title>reduce bucket") == 3
    assert "<title>gather bucket 2 of stage 0, 512 bytes 0.000..1.000 ms</title>" in picture
    assert "bucket reduced" in picture


def test_buckets_move_with_the_clock() -> None:
    (first, *_) = _timeline().ranks[0].shifted(100.0).spans
    assert (first.start_ms, first.end_ms, first.bucket) == (105.0, 108.0, Bucket(stage=0, index=0, num_bytes=512))
