"""The trace of recorded iterations: what a viewer needs to draw it, and every op and transfer in its place."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.render.svg import Panel, render_svg
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import Activity, RankTimeline, Timeline
from tests.profiling.support import as_recorded, span
from tests.support.traces import check_trace

SVG = "{http://www.w3.org/2000/svg}"


def events_of(*timelines: Timeline) -> list[dict[str, Any]]:
    return list(json.loads(render_trace(timelines))["traceEvents"])


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zbv", "interleaved-1f1b"])
def test_every_op_once_on_its_rank_and_events_nest(name: str) -> None:
    timeline = as_recorded(name, 3, 7)
    events = events_of(timeline)
    check_trace(events, timeline.plan, iterations=[7])
    first = next(event for event in events if event["name"] == "0F0")
    assert (first["pid"], first["tid"], first["ts"]) == (0, 0, 0.0)
    assert first["args"] == {"stage": 0, "microbatch": 0, "iteration": 7}


def test_a_plan_is_an_iteration_of_its_ops() -> None:
    plan = build_plan("zbv", num_ranks=3, num_microbatches=4)
    events = events_of(Timeline.planned(simulate(plan, CostModel.uniform(plan.placement))))
    passes = [event for event in events if event["ph"] == "X" and event["cat"] != "iteration"]
    assert len(passes) == sum(map(len, plan.ops))
    assert passes[0] == {
        "name": "0F0",
        "cat": "F",
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 500.0,
        "args": {"stage": 0, "microbatch": 0, "iteration": 1},
    }


def test_transfers_name_their_message_and_are_joined_by_arrows() -> None:
    events = events_of(as_recorded("zbv", 2, 4))
    sends = [event for event in events if event.get("cat") == "send"]
    for event in sends:
        assert event["args"]["from_rank"] == event["pid"]
        assert event["name"] == "{payload} for stage {stage}, microbatch {microbatch}".format(**event["args"])
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(sends) == len(starts) == len(ends)
    assert starts.keys() == ends.keys()
    for name, start in starts.items():
        assert start["pid"] != ends[name]["pid"]
        assert start["ts"] <= ends[name]["ts"]


def test_sends_that_overlap_get_lanes_of_their_own() -> None:
    timeline = as_recorded("zb-h2", 3, 6)  # a send is 2 ms long, an op 1 ms
    lanes = {(event["pid"], event["tid"]) for event in events_of(timeline) if event.get("cat") == "send"}
    assert len(lanes) > timeline.plan.num_ranks
    names = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events_of(timeline) if event["name"] == "thread_name"
    }
    assert {names[lane] for lane in lanes} == {"send"}


def test_several_iterations_share_one_clock() -> None:
    first = as_recorded("zb-h1", 2, 3, iteration=4)
    second = as_recorded("zb-h1", 2, 3, iteration=9)
    second = Timeline(iteration=9, plan=second.plan, ranks=tuple(rank.shifted(1000.0) for rank in second.ranks))
    events = events_of(first, second)
    check_trace(events, first.plan, iterations=[4, 9])
    starts = [event["ts"] for event in events if event["name"] == "0F0"]
    assert starts == [0.0, 1e6]
    assert [event["name"] for event in events if event.get("cat") == "iteration"] == ["iteration 4", "iteration 9"]
    counts = Counter((event["pid"], event["tid"], event["name"]) for event in events if event["ph"] == "M")
    assert set(counts.values()) == {1}


def test_the_optimizer_and_validation_are_on_a_thread_of_their_own() -> None:
    timeline = as_recorded("zb-h1", 2, 3)
    extra = (span(Activity.REWIND, -3.0, -1.0), span(Activity.VALIDATE, -2.0, -1.5), span(Activity.GRADIENTS, 99.0, 99.5))
    ranks = (RankTimeline(ops=timeline.ranks[0].ops, spans=(*timeline.ranks[0].spans, *extra)), timeline.ranks[1])
    events = events_of(Timeline(iteration=7, plan=timeline.plan, ranks=ranks))
    check_trace(events, timeline.plan, iterations=[7])
    around = [event["name"] for event in events if event["pid"] == 0 and event["tid"] == 1 and event["ph"] == "X"]
    assert sorted(around) == ["gradients", "optimizer", "rewind", "validate"]
    assert next(event["ts"] for event in events if event["name"] == "rewind") == 0.0


def test_nothing_recorded_is_an_empty_trace() -> None:
    assert events_of() == []


def test_a_broken_trace_is_noticed() -> None:
    """That the check can fail."""
    timeline = as_recorded("zb-h1", 2, 3)
    events = events_of(timeline)
    op = next(index for index, event in enumerate(events) if event["name"] == "1B1")
    with pytest.raises(AssertionError):
        check_trace(events[:op] + events[op + 1 :], timeline.plan, iterations=[7])
    for change in ({"pid": 0}, {"dur": events[op]["dur"] + 100.0}):
        changed = [*events[:op], events[op] | change, *events[op + 1 :]]
        with pytest.raises(AssertionError):
            check_trace(changed, timeline.plan, iterations=[7])


def test_plan_and_recorded_run_on_one_axis() -> None:
    timeline = as_recorded("zbv", 2, 4)
    late = Timeline(iteration=7, plan=timeline.plan, ranks=tuple(rank.shifted(5e4) for rank in timeline.ranks))
    panels = [Panel.of_ops(timeline.rows, caption="planned"), Panel(caption="measured", ranks=late.ranks)]
    root = ElementTree.fromstring(render_svg(panels, title="<both>"))
    boxes = [(box, box.find(f"{SVG}title")) for box in root.iter(f"{SVG}rect")]
    titled = [((title.text or "").split()[0], box.get("x"), box.get("width")) for box, title in boxes if title is not None]
    ops = [str(timed.op) for row in timeline.rows for timed in row]
    assert Counter(name for name, _, _ in titled if name in ops) == Counter(ops * 2)
    places = {(name, x, width) for name, x, width in titled if name in ops}
    assert len(places) == len(ops), "the same times are at the same place in both"
    assert [name for name, _, _ in titled].count("optimizer") == 2
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"<both>", "planned", "measured", "waiting for a message", "optimizer"} <= set(texts)
    width = float(root.get("width") or 0)
    assert all(float(box.get("x", 0)) + float(box.get("width", 0)) <= width + 1e-6 for box in root.iter(f"{SVG}rect"))
