"""Plans and recorded runs as text, as SVG and as traces."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.render.svg import Panel, render_svg
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.simulate import TimedOp, simulate
from megatron.zerobubble.plan.timeline import Activity, Bucket, RankTimeline, Span, Timeline
from tests.profiling.support import as_recorded, span
from tests.support.traces import check_trace

SVG = "{http://www.w3.org/2000/svg}"
NAMES = [info.name for info in known_schedules()]


def simulated(name: str, p: int = 3, m: int = 5) -> list[list[TimedOp]]:
    plan = build_plan(name, num_ranks=p, num_microbatches=m)
    return [list(row) for row in simulate(plan, CostModel.uniform(plan.placement, comm_ms=0.1)).rows]


def test_text_of_a_small_plan() -> None:
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=3)
    assert render_text(simulate(plan, CostModel.uniform(plan.placement)).rows).splitlines() == [
        "ms      0  1  2  3  4  5  6  7  8  9  10",
        "rank 0  F0 F1 .. B0 W0 F2 B1 W1 B2 W2",
        "rank 1     F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


def test_text_writes_the_second_chunk_small_and_a_third_in_full() -> None:
    assert "f0" in render_text(simulated("zbv"))
    plan = build_plan("interleaved-1f1b", num_ranks=2, num_microbatches=2, num_chunks=3)
    assert "4BW1" in render_text(simulate(plan, CostModel.uniform(plan.placement)).rows)


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("name", NAMES)
def test_text_fits(name: str, width: int) -> None:
    """Or the text says how many columns it takes; with these it fits."""
    rows = simulated(name, 4, 20)
    text = render_text(rows, max_width=width)
    if text.startswith("(too wide"):
        takes = int(text.split("--width ")[1].split()[0])
        assert takes > width
        text, width = render_text(rows, max_width=takes), takes
    lines = text.splitlines()
    assert len(lines) == 5
    assert max(map(len, lines[1:])) <= width + 1
    assert all(re.fullmatch(r"([A-Za-z.\- ]|\d*[A-Za-z]+\d+)*", line[7:]) for line in lines[1:]), "no digit without its letter"


def test_the_colors_of_a_text_are_around_its_ops() -> None:
    """Black on the light background of a first chunk, white on the dark one of a second; without them the text is the same."""
    rows = simulated("zbv")
    colored, plain = render_text(rows, is_colored=True), render_text(rows)
    assert re.sub(r"\033\[[0-9;]*m", "", colored) == plain
    assert "\033[30;48;5;110mF0" in colored
    assert "\033[97;48;5;25mf0" in colored
    assert "\033[0m" in colored


@pytest.mark.parametrize("name", NAMES)
def test_svg_is_a_document_with_every_op_in_it(name: str) -> None:
    rows = simulated(name)
    root = ElementTree.fromstring(render_svg([Panel.of_ops(rows)], title="<title> & more", subtitle="'quoted'"))
    assert root.tag == f"{SVG}svg"
    titles = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert [text.split()[0] for text in titles] == [str(timed.op) for row in rows for timed in row]
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "<title> & more" in texts
    assert "rank 2" in texts
    assert "@media(prefers-color-scheme:dark)" in (root.find(f"{SVG}style").text or "")  # type: ignore[union-attr]
    width = float(root.get("width") or 0)
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width + 1e-6


def test_svg_leaves_out_numbers_that_do_not_fit() -> None:
    def numbers(width_px: int) -> int:
        root = ElementTree.fromstring(render_svg([Panel.of_ops(simulated("zbv", 4, 24))], width_px=width_px))
        return sum((element.text or "").isdigit() and element.get("class") != "muted" for element in root.iter(f"{SVG}text"))

    assert numbers(4000) == 4 * 24 * 6
    assert numbers(400) == 0


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_an_empty_timeline_renders(rows: list[list[TimedOp]]) -> None:
    assert render_text(rows).startswith("ms")
    ElementTree.fromstring(render_svg([Panel.of_ops(rows)]))


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
    first = {"name": "0F0", "cat": "F", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 500.0}
    assert passes[0] == first | {"args": {"stage": 0, "microbatch": 0, "iteration": 1}}


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
