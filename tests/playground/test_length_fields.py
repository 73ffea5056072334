"""Lengths of microbatches and links of ranks, from a request to the drawing and its file."""

from __future__ import annotations

import json
import statistics
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron.zerobubble.errors import UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import build_plan, known_schedules, schedule_spec
from megatron.zerobubble.plan.search.assign import ITERATION_BUDGET
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.playground.exports import Export, export
from megatron.zerobubble.playground.length_fields import as_it_came, log_normal_lengths
from megatron.zerobubble.playground.opened_files import open_file, plan_result
from megatron.zerobubble.playground.problem import PageRequest, read_problem
from megatron.zerobubble.playground.tasks import run_task

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "lengths and links in the playground: form, address, drawing and table of slots, comparison with the data as it came, "
    "files of version 2 out and in, bad input in one line",
    "works, Chromium",
    also=("playground/test_unequal_page.py",),
)

TOKENS = [512, 4096, 700, 1800, 1024, 96]
GOOD: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 6, "schedule": "zbv", "microbatch_tokens": TOKENS}
LINKS = {"latency_ms": [[0, 0.5], [1.0, 0]]}
FASTER = LINKS | {"gigabytes_per_s": [[0, 1], [2, 0]]}


def read(**changes: Any) -> PageRequest:
    return read_problem(json.dumps(GOOD | changes).encode())


def search(**changes: Any) -> list[dict[str, Any]]:
    """The drawings of a search."""
    events = list(run_task("search", json.dumps(GOOD | changes).encode()))
    assert events[-1]["event"] == "times", events[-1]
    return [event["drawing"] | {"commands": event["commands"]} for event in events if "drawing" in event]


def test_lengths_and_links_become_the_costs_of_every_microbatch() -> None:
    times = {"forward_ms": 2.0, "activation_after_backward": 0.5}
    costs = read(attention_share=0.1, times=times).costs_of(Placement.v(2))
    every = costs.table
    assert every is not None
    assert every.tokens == tuple(TOKENS)
    assert costs.forward_ms == pytest.approx((1.0,) * 4), "the times are the means"
    model = LengthModel.of(
        CostModel.uniform(Placement.v(2), **times),
        tokens=statistics.fmean(TOKENS),
        squares=statistics.fmean(count * count for count in TOKENS),
        attention_share=0.1,
    )
    assert every == model.costs(TOKENS)
    table = CostModel.uniform(Placement.v(2), **times).to_json()
    assert read(attention_share=0.1, stages=table).costs_of(Placement.v(2)) == costs
    assert read(attention_share=0.1, stages=table).costs_of(Placement.linear(2)).forward_ms == pytest.approx((2.0, 2.0))
    links = read(links=FASTER, bytes_per_token=1000).costs_of(Placement.v(2)).links
    assert links is not None
    assert links.time_ms(0, 1, 1) == pytest.approx(0.5 + 4.096)
    assert links.time_ms(1, 0, 1) == pytest.approx(1.0 + 2.048)


def test_equal_lengths_and_links_are_the_plain_problem() -> None:
    equal = read(microbatch_tokens=[512] * 6, links={"latency_ms": [[0, 0.5], [0.5, 0]]})
    plain = read(microbatch_tokens=None, times={"comm_ms": 0.5})
    assert equal.is_plain
    assert equal.costs_of(Placement.v(2)) == plain.costs_of(Placement.v(2))
    assert not read().is_plain
    assert not read(microbatch_tokens=None, links=LINKS).is_plain
    drawn = search(microbatch_tokens=[512] * 6)[-1]
    assert (drawn["slots"], drawn["lengths"]) == (None, [])
    assert "idle_share" not in drawn["metrics"]
    assert json.loads(drawn["plan"])["format"] == "zerobubble-plan/1"


def test_log_normal_lengths_are_drawn_from_a_seed() -> None:
    given = {"mean": 2000, "variation": 0.6, "seed": 7}
    lengths = read(num_microbatches=512, microbatch_tokens=given).lengths.tokens
    assert lengths == log_normal_lengths(512, mean=2000, variation=0.6, seed=7)
    assert lengths != log_normal_lengths(512, mean=2000, variation=0.6, seed=8)
    assert statistics.fmean(lengths) == pytest.approx(2000, rel=0.1)
    assert statistics.pstdev(lengths) / statistics.fmean(lengths) == pytest.approx(0.6, rel=0.15)
    assert set(log_normal_lengths(6, mean=300, variation=0, seed=0)) == {300}


@pytest.mark.parametrize("name", [info.name for info in known_schedules()])
def test_without_a_search_the_page_shows_what_a_run_would_plan(name: str) -> None:
    (drawn,) = search(schedule=name, attention_share=0.1)
    spec = schedule_spec(name, num_ranks=2)
    costs = read(attention_share=0.1).costs_of(spec.placement)
    options = SearchOptions(objective=Objective.MAKESPAN, budget=ITERATION_BUDGET)
    plan = MicrobatchPlanner(spec, 6, options=options).plan(costs)
    assert Plan.from_json(drawn["plan"]) == plan
    assert drawn["commands"] == {}
    own = simulate(build_plan(name, num_ranks=2, num_microbatches=6), costs)
    assert drawn["metrics"]["came_idle_share"] == pytest.approx(own.idle_share)
    assert drawn["metrics"]["idle_share"] == pytest.approx(simulate(plan, costs).idle_share)
    assert drawn["metrics"]["came_makespan_ms"] >= drawn["metrics"]["makespan_ms"]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "v-half"])
def test_long_microbatches_have_more_slices_than_short_ones(name: str) -> None:
    (whole,) = search(schedule=name, attention_share=0.1)
    (drawn,) = search(schedule=name, attention_share=0.1, num_slices=4)
    plan = Plan.from_json(drawn["plan"])
    assert sorted(plan.slice_counts) == [1, 1, 1, 1, 2, 4]
    assert drawn["num_slices"] == 4
    assert {max(rank["slices"]) for rank in drawn["ranks"]} == {3}
    assert drawn["metrics"]["makespan_ms"] < (0.95 if name == "1f1b" else 1.01) * whole["metrics"]["makespan_ms"]
    assert drawn["metrics"]["came_makespan_ms"] >= drawn["metrics"]["makespan_ms"]
    again = open_file(drawn["plan"].encode())["drawings"][0]
    assert again["slots"] == drawn["slots"]
    assert again["slots"]["tokens"] == [TOKENS[index] for index in plan.assignment]
    assert again["ranks"] == drawn["ranks"]


def test_a_search_within_a_limit_keeps_it_and_auto_counts_tokens() -> None:
    for drawn in search(effort="fast", memory_limit=1.8):
        validate(Plan.from_json(drawn["plan"]), memory_limit=1.8, costs=read().costs_of(Placement.v(2)))
        assert drawn["memory_limit"] == 1.8
    chosen = search(schedule="auto")[-1]
    assert chosen["memory_limit"] == pytest.approx((4096 + 1800) * 6 / (2 * sum(TOKENS)))
    assert max(chosen["metrics"]["peak_memory"]) <= chosen["memory_limit"] + 1e-9
    assert read(schedule="auto", microbatch_tokens=None).memory_limit == 1.0


def test_a_drawing_has_the_microbatch_and_the_tokens_of_every_slot() -> None:
    drawn = search(attention_share=0.1)[-1]
    plan = Plan.from_json(drawn["plan"])
    assert sorted(plan.assignment) == list(range(6))
    assert drawn["slots"] == {"indices": list(plan.assignment), "tokens": [TOKENS[index] for index in plan.assignment]}
    widths: dict[int, float] = {}
    for rank in drawn["ranks"]:
        for kind, slot, start, end in zip(rank["kinds"], rank["microbatches"], rank["starts"], rank["ends"], strict=True):
            if kind == 0:
                widths[slot] = end - start
    by_tokens = sorted(range(6), key=drawn["slots"]["tokens"].__getitem__)
    assert sorted(widths, key=lambda slot: widths[slot]) == by_tokens, "each at its own width"
    words = " ".join(drawn["lengths"])
    assert "microbatches of 96 to 4096 tokens (mean 1371)" in words
    assert "in the schedule's own order with the data as it came" in words
    again = open_file(drawn["plan"].encode())["drawings"][0]
    for name in ("slots", "lengths", "metrics", "problem", "attention_share"):
        assert again[name] == drawn[name], name
    assert drawn["attention_share"] == pytest.approx(0.1)
    assert json.loads(drawn["plan"])["format"] == "zerobubble-plan/2"


def test_links_alone_are_shown_and_the_plan_is_for_them() -> None:
    drawn = search(microbatch_tokens=None, links=FASTER | {"message_bytes": [2e6]})[-1]
    assert drawn["lengths"][0] == "links of 2.000 to 2.500 ms per mean message between neighboring ranks"
    drawn = search(microbatch_tokens=None, links=LINKS)[-1]
    assert drawn["lengths"][0] == "links of 0.500 to 1.000 ms per mean message between neighboring ranks"
    assert json.loads(drawn["plan"])["costs"]["links"]["latency_ms"] == LINKS["latency_ms"]
    assert drawn["commands"], "a run may load it: its microbatches are equal"


def test_a_file_of_links_is_opened() -> None:
    opened = open_file(json.dumps(FASTER).encode())
    assert opened == {"kind": "links", "links": FASTER | {"message_bytes": [0.0]}, "num_ranks": 2, "verdict": ""}
    with pytest.raises(UserError, match="num_ranks is 65; the playground takes whole numbers from 1 to 64"):
        open_file(json.dumps({"latency_ms": [[0.0] * 65] * 65}).encode())
    with pytest.raises(UserError, match="latency_ms has 2 rows of 1 numbers"):
        open_file(b'{"latency_ms": [[0], [0]]}')


def test_only_plans_for_the_same_lengths_and_links_are_alike() -> None:
    base, other = search()[-1]["problem"], search(microbatch_tokens=[1371, 1371, 1371, 1371, 1371, 1373])[-1]["problem"]
    same = search(schedule="1f1b")[-1]["problem"]
    assert same["microbatches"] == pytest.approx(base["microbatches"])
    assert other["microbatches"] != pytest.approx(base["microbatches"])
    assert base["links"] == []
    assert search(links=LINKS)[-1]["problem"]["links"] == [0.5, 1.0]


def test_a_schedule_of_another_name_is_compared_with_nothing() -> None:
    drawn = search()[-1]
    body = json.loads(drawn["plan"])
    result = plan_result(drawn["plan"], body)
    assert as_it_came(result.simulation.plan, result.simulation.costs) is not None
    named = open_file(json.dumps(body | {"schedule": "mine"}).encode())["drawings"][0]
    assert "came_idle_share" not in named["metrics"]
    assert named["metrics"]["idle_share"] == drawn["metrics"]["idle_share"]
    unassigned = {key: value for key, value in body.items() if key != "costs"}
    assert open_file(json.dumps(unassigned).encode())["drawings"][0]["slots"]["tokens"] == []


def test_a_picture_names_the_microbatch_of_the_data() -> None:
    drawn = search()[-1]
    result = plan_result(drawn["plan"], json.loads(drawn["plan"]))
    picture = export(result.simulation, Export.SVG).text
    titles = [element.text or "" for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]
    first = result.simulation.plan.assignment[0]
    assert sum(f"(microbatch {first} of the data, {TOKENS[first]} tokens)" in title for title in titles) == 4 * 3
    assert "microbatches of 96 to 4096 tokens" in picture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatch_tokens": [512, 0, 3]}, "microbatch 1 has 0 tokens; give a whole number, 1 or more"),
        ({"microbatch_tokens": [512, -7]}, "microbatch 1 has -7 tokens"),
        ({"microbatch_tokens": ["nothing"]}, "microbatch 0 has 'nothing' tokens"),
        ({"microbatch_tokens": [1.5] * 6}, "microbatch 0 has 1.5 tokens"),
        ({"microbatch_tokens": [10**400] * 6}, "tokens; give a whole number, at most 1e\\+12"),
        ({"microbatch_tokens": []}, "no microbatch has tokens"),
        ({"microbatch_tokens": [512, 700]}, "microbatch_tokens has 2 lengths and num_microbatches is 6"),
        ({"microbatch_tokens": "512"}, "microbatch_tokens must be a list of one number per microbatch"),
        ({"microbatch_tokens": {"mean": 5}}, "are an object with mean, variation, seed"),
        ({"microbatch_tokens": {"mean": 5, "variation": 11, "seed": 0}}, "the lengths' variation is 11"),
        ({"microbatch_tokens": {"mean": 5, "variation": 1, "seed": -1}}, "the seed of the lengths is -1"),
        ({"attention_share": 2}, "attention_share is 2; give a number from 0 to 1"),
        (
            {"links": {"latency_ms": [[0] * 3] * 3}},
            "latency_ms of 3 ranks and num_ranks is 2; give one row",
        ),
        ({"links": {"latency_ms": [[0, 1], [1]]}}, "latency_ms has 2 rows of 1, 2 numbers"),
        ({"links": {"latency_ms": [[0, "x"], [1, 0]]}}, "latency_ms from rank 0 to rank 1 is 'x'"),
        (
            {"links": {"latency_ms": [[0, 1e9], [1, 0]]}},
            "latency_ms from rank 0 to rank 1 is 1000000000.0; give",
        ),
        ({"links": [[0, 1], [1, 0]]}, "links must be an object with latency_ms"),
        ({"links": FASTER}, "gigabytes_per_s and messages of 0 bytes; give bytes_per_token with microbatch_tokens"),
        ({"links": FASTER | {"gigabytes_per_s": [[0, 0], [1, 0]]}}, "gigabytes_per_s from rank 0 to rank 1 is 0"),
        ({"bytes_per_token": -1}, "bytes_per_token is -1"),
    ],
)
def test_bad_lengths_and_links_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_more_tokens_than_the_limit_can_hold_are_refused_with_the_numbers() -> None:
    events = list(run_task("search", json.dumps(GOOD | {"memory_limit": 1.2}).encode()))
    assert events[-1]["event"] == "error"
    assert "microbatch 1 has 4096 tokens and the limit holds at most 3291" in events[-1]["message"]
    twice = read(stages=read().costs_of(Placement.v(2)).to_json())
    with pytest.raises(UserError, match=r"drop the lengths \(--microbatch-tokens\)"):
        twice.costs_of(Placement.v(2))
