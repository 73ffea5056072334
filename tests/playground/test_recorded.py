"""Traces, reports and other files that are read back, and refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.playground.drawing import draw_recorded
from megatron.zerobubble.playground.models.presets import layered
from megatron.zerobubble.playground.opened_files import open_file
from megatron.zerobubble.playground.recorded import read_trace
from megatron.zerobubble.profiling.report import report, reports_to_json
from tests.profiling.support import as_recorded


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-1f1b"])
def test_a_run_s_trace_is_read_back_as_it_was(name: str) -> None:
    runs = [as_recorded(name, 4, 6, iteration=number) for number in (3, 12)]
    again = read_trace(json.loads(render_trace(runs)))
    assert [timeline.iteration for timeline in again] == [3, 12]
    for before, after in zip(runs, again, strict=True):
        assert after.plan == before.plan
        reported, meant = report(after), report(before)
        assert reported.bubble_rate == pytest.approx(meant.bubble_rate)
        assert reported.simulation.costs.comm_ms == pytest.approx(0.25)
        assert [rank.to_json() for rank in reported.ranks] == [pytest.approx(rank.to_json()) for rank in meant.ranks]
        assert len(draw_recorded(after)["spans"]) == 4


def test_measured_activations_travel_in_the_trace() -> None:
    sizes = {"activation": (0.5,) * 8, "activation_after_backward": (0.125,) * 8}
    run = replace(as_recorded("zbv", 4, 6), activations=sizes)
    body = json.loads(render_trace([run]))
    (again,) = read_trace(body)
    assert again.activations == sizes
    drawn = draw_recorded(again)
    assert drawn["metrics"]["peak_memory"] == list(report(run).simulation.peak_memory)
    assert drawn["memory_is_assumed"] is False
    assert draw_recorded(replace(run, activations=None))["memory_is_assumed"] is True
    for values in ([0.5] * 7, 3, ["x"] * 8, [-1.0] * 8):
        about = next(event["args"] for event in body["traceEvents"] if event.get("cat") == "iteration")
        about["activation"] = values
        with pytest.raises(UserError, match="activation"):
            read_trace(body)


def test_a_report_gives_its_costs() -> None:
    seen = report(as_recorded("zbv", 4, 6))
    answer = open_file(reports_to_json([seen]).encode())
    assert answer["costs"] == seen.simulation.costs.to_json()
    assert (answer["kind"], answer["num_ranks"], answer["num_microbatches"], answer["schedule"]) == ("costs", 4, 6, "zbv")


def test_a_comparison_gives_its_costs_and_a_layer_file_its_layers() -> None:
    bench = {"contenders": [], "num_ranks": 4, "num_microbatches": 6, "costs": COSTS}
    opened = open_file(json.dumps(bench).encode())
    assert (opened["kind"], opened["from"], opened["costs"]) == ("costs", "a comparison", COSTS)
    opened = open_file(json.dumps(layered("Kimi-K2").to_json()).encode())
    assert (opened["kind"], opened["num_layers"], opened["layers"]) == ("model", 61, layered("Kimi-K2").to_json())


Change = Callable[[dict[str, Any]], Any]


def _ops(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in body["traceEvents"] if event.get("cat") in ("F", "B", "W")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(traceEvents=7), "must be a list"),
        (lambda body: body.update(traceEvents=[]), "has no passes"),
        (lambda body: body["traceEvents"].remove(_ops(body)[5]), "missing"),
        (lambda body: body["traceEvents"].append(_ops(body)[5]), "computed twice"),
        (lambda body: _ops(body)[0].update(name="rm -rf"), "is not an op"),
        (lambda body: _ops(body)[0].update(ts="now"), "give a number"),
        (lambda body: _ops(body)[0].update(ts=1e300), "give a number"),
        (lambda body: _ops(body)[0].update(dur=-1), "give a number from 0"),
        (lambda body: _ops(body)[0].update(pid=64), "its rank, is 64"),
        (lambda body: _ops(body)[0].update(pid=3), "missing|more than one|ran on ranks"),
        (lambda body: _ops(body)[0].update(pid=[1]), "whole number"),
        (lambda body: _ops(body)[0]["args"].update(iteration="x"), "whole number"),
        (lambda body: _ops(body)[0].update(name="0F9999"), "num_microbatches is 10000"),
    ],
)
def test_a_damaged_trace_is_refused_with_the_reason(change: Change, message: str) -> None:
    body = json.loads(render_trace([as_recorded("zbv", 4, 6)]))
    change(body)
    with pytest.raises(UserError, match=message):
        read_trace(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<!doctype html>", "^the file is not JSON: Expecting value.*; give a plan"),
        (b"\x89PNG\r\n", "^the file is not JSON: .*; give a plan"),
        (b" \n", "^the file is not JSON: Expecting value.*; give a plan"),
        (b'{"format": ', "^the file is not JSON: Expecting value"),
        (b"[1, 2]", "^the file is JSON, but a list and not an object; give a plan"),
    ],
)
def test_a_file_that_is_not_a_json_object_is_refused_with_what_is_taken(body: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_file(body)


COSTS = CostModel.uniform(Placement.v(4)).to_json()
PLAN = json.loads(build_plan("zbv", num_ranks=4, num_microbatches=6).to_json())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give a plan"),
        ({"format": "zerobubble-plan/9"}, "zerobubble-plan/9"),
        ({"format": "zerobubble-report/1", "iterations": []}, "no iterations"),
        ({"format": "zerobubble-report/1", "iterations": [{"iteration": 3, "costs": 3}]}, "costs must be an object"),
        (PLAN | {"ops": PLAN["ops"][:2]}, "rows of ops"),
        (PLAN | {"stage_to_rank": [0, 1]}, "num_ranks 4 but"),
        (PLAN | {"costs": {"forward_ms": [1]}}, "'backward_ms' must be a list"),
        (PLAN | {"ops": [row[1:] + row[:1] for row in PLAN["ops"]]}, "zbv"),
        ({"forward_ms": 3}, "must be a list"),
        (PLAN | {"schedule": "x" * 81}, "a name of 81 letters"),
        (PLAN | {"costs": COSTS | {"forward_ms": [1e300] * 8}}, "forward_ms of stage 0 is 1e"),
    ],
)
def test_a_file_that_is_nothing_we_know_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_file(json.dumps(copy.deepcopy(body)).encode())
