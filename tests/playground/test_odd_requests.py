"""Requests and files that nobody means: the worker answers each with one line, and never ends without an answer."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.playground.tasks import lines
from tests.support.odd_values import DEEP, HUGE, as_json, changed

PLAN = json.loads(build_plan("zbv", num_ranks=2, num_microbatches=3).to_json())
SMALL = {"num_ranks": 2, "num_microbatches": 4, "schedule": "zbv", "effort": "drawn"}
STAGES = {name: [1.0] * 4 for name in ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")}
SIMULATED = simulate(Plan.from_json(json.dumps(PLAN)), CostModel.uniform(Placement.v(2)))
TRACE = json.loads(render_trace([Timeline.planned(SIMULATED)]))
# Each with the field that holds a file as text.
GOOD: list[tuple[str, dict[str, Any], str]] = [
    ("search", SMALL | {"times": dict.fromkeys(("forward_ms", "backward_ms", "wgrad_ms"), 1)}, ""),
    ("search", SMALL | {"stages": STAGES | {"comm_ms": 1}, "memory_limit": 4, "seed": 1}, ""),
    ("search", SMALL | {"schedule": "zb", "max_pending_backward": 2, "num_slices": 2}, ""),
    ("pareto", SMALL | {"model": {"preset": "Kimi-K2"}, "memory_limits": [4]}, ""),
    ("open", PLAN, ""),
    ("open", PLAN | {"format": "zerobubble-plan/2", "assignment": [2, 0, 1]}, ""),
    ("open", PLAN | {"costs": STAGES | {"comm_ms": 0}}, ""),
    ("open", TRACE, ""),
    ("show", {"plan": PLAN}, "plan"),
    ("export", {"plan": PLAN, "form": "torch-csv"}, "plan"),
]


def check_answered(task: str, body: bytes) -> str:
    """The task's last event; an exception fails the test."""
    event = list(map(json.loads, lines(task, body)))[-1]
    if event["event"] == "error":
        message, _, _ = event["message"].partition("\n  step ")  # an order's fault is shown in its grid
        assert message.isprintable()
        assert 0 < len(message) < 500, message
        assert "recursion" not in message
    return str(event["event"])


@settings(deadline=None, derandomize=True, database=None, max_examples=1000)
@given(st.sampled_from(GOOD), st.integers(0, 10**9))
def test_any_request_is_answered_or_refused_in_one_line(good: tuple[str, dict[str, Any], str], seed: int) -> None:
    task, body, file = good
    body = changed(body, Random(seed))
    if file in body:
        body[file] = as_json(body[file])
    check_answered(task, as_json(body).encode())


@pytest.mark.parametrize("task", ["search", "open"])
@pytest.mark.parametrize("body", ['{"num_ranks": ' + HUGE + "}", HUGE, DEEP, '{"a": "\udcff"}'], ids=len)
def test_what_is_no_json_is_refused_in_one_line(task: str, body: str) -> None:
    assert check_answered(task, body.encode("utf-8", "surrogateescape")) == "error"


def test_times_of_0_are_planned() -> None:
    times = {"forward_ms": 0, "backward_ms": 0, "wgrad_ms": 0}
    assert check_answered("search", as_json(SMALL | {"times": times}).encode()) == "best"
