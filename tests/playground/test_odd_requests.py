"""Requests and files that nobody means: the worker answers each with one line, and never ends without an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.playground.tasks import lines

PLAN = json.loads(build_plan("zbv", num_ranks=2, num_microbatches=3).to_json())
SMALL = {"num_ranks": 2, "num_microbatches": 4, "schedule": "zbv", "effort": "drawn"}
STAGES = {name: [1.0] * 4 for name in ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")}
LINKS = {"latency_ms": [[0, 1], [1, 0]]}
DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 5000
_SIMULATED = simulate(Plan.from_json(json.dumps(PLAN)), CostModel.uniform(Placement.v(2)))
WHOLE = json.loads(render_trace([Timeline.planned(_SIMULATED)]))
TRACE = {"traceEvents": [{"ph": "X", "cat": "F", "name": "0F0", "ts": 0, "dur": 1, "tid": 0, "pid": 0}]}


def text(body: Any) -> bytes:
    return json.dumps(body).encode()


def nested(body: dict[str, Any], key: str, depth: int = 900) -> bytes:
    return json.dumps(body | {key: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth).encode()


REQUESTS: list[tuple[str, bytes]] = [
    ("search", text(SMALL | {"times": {"forward_ms": 10**400}})),
    ("search", text(SMALL | {"times": {"forward_ms": 1e308}})),
    ("search", text(SMALL | {"times": dict.fromkeys(("forward_ms", "backward_ms", "wgrad_ms"), 5e-324)})),
    ("search", text(SMALL | {"stages": STAGES | {"forward_ms": [10**400] * 4}})),
    ("search", text(SMALL | {"stages": STAGES | {name: [5e-324] * 4 for name in ("forward_ms", "backward_ms", "wgrad_ms")}})),
    ("search", text(SMALL | {"stages": STAGES | {"comm_ms": 10**400}})),
    ("search", text(SMALL | {"memory_limit": 10**400})),
    ("search", text(SMALL | {"memory_limit": 5e-324})),
    ("search", text(SMALL | {"seed": 10**400})),
    ("search", text(SMALL | {"num_ranks": 10**400})),
    ("search", text(SMALL | {"schedule": "\ud800\n" * 5000})),
    ("search", text(SMALL | {"schedule": "zb", "max_pending_backward": HUGE})),
    ("search", text(SMALL | {"x" * 5000: 1, "\ud800": 2})),
    ("search", ('{"num_ranks": ' + HUGE + "}").encode()),
    ("search", DEEP.encode()),
    ("search", nested(SMALL, "memory_limit")),
    ("search", nested(SMALL, "schedule")),
    ("search", nested(SMALL, "stages")),
    ("search", text(SMALL | {"microbatch_tokens": [10**400] * 4})),
    ("search", text(SMALL | {"microbatch_tokens": {"mean": 10**400, "variation": 1, "seed": 0}})),
    ("search", text(SMALL | {"microbatch_tokens": {"mean": 1, "variation": 1, "seed": HUGE}})),
    ("search", text(SMALL | {"links": {"latency_ms": [[0, 10**400], [1, 0]]}})),
    ("search", text(SMALL | {"links": LINKS | {"gigabytes_per_s": [[0, 5e-324], [1, 0]], "message_bytes": [1]}})),
    ("search", nested(SMALL, "microbatch_tokens")),
    ("search", nested(SMALL, "links")),
    ("open", text(PLAN | {"format": "zerobubble-plan/2", "assignment": [10**400, 0, 1]})),
    ("open", text(PLAN | {"format": "zerobubble-plan/2", "costs": STAGES | {"microbatches": {"tokens": HUGE}}})),
    ("pareto", text(SMALL | {"memory_limits": [10**400]})),
    ("open", DEEP.encode()),
    ("open", HUGE.encode()),
    ("open", b'{"a": "\xff"}'),
    ("open", text({"format": "\ud800" * 5000})),
    ("open", text(PLAN | {"ops": [[HUGE + "F0"], []]})),
    ("open", text(PLAN | {"num_ranks": 10**400})),
    ("open", text(PLAN | {"num_microbatches": 10**400})),
    ("open", text(PLAN | {"schedule": "\ud800"})),
    ("open", text(PLAN | {"costs": STAGES | {"forward_ms": [10**400] * 4}})),
    ("open", text(PLAN | {"costs": STAGES | {name: [5e-324] * 4 for name in ("forward_ms", "backward_ms", "wgrad_ms")}})),
    ("open", nested(PLAN, "costs")),
    ("open", nested(PLAN, "ops")),
    ("open", text({"traceEvents": [TRACE["traceEvents"][0] | {"ts": 10**400}]})),
    ("open", text({"traceEvents": [TRACE["traceEvents"][0] | {"name": HUGE + "F0"}]})),
    ("open", text({"traceEvents": [TRACE["traceEvents"][0] | {"tid": 10**400}]})),
    ("open", nested({}, "traceEvents")),
    ("show", text({"plan": "\ud800"})),
    ("show", text({"plan": DEEP})),
    ("show", text({"plan": json.dumps(PLAN | {"schedule": "\ud800"})})),
    ("export", text({"plan": json.dumps(PLAN), "form": "x" * 5000})),
    ("export", nested({"plan": json.dumps(PLAN)}, "form")),
    ("compare", text({"plan": "\ud800", "trace": WHOLE})),
    ("compare", nested({"plan": json.dumps(PLAN)}, "trace")),
]


@pytest.mark.parametrize(("task", "body"), REQUESTS, ids=range(len(REQUESTS)))
def test_an_odd_request_is_answered_in_one_line(task: str, body: bytes) -> None:
    events = list(map(json.loads, lines(task, body)))
    assert events[-1]["event"] == "error"
    message = events[-1]["message"]
    assert message.isprintable()
    assert 0 < len(message) < 500, message
    assert "recursion" not in message


def test_times_of_0_are_planned() -> None:
    times = {"forward_ms": 0, "backward_ms": 0, "wgrad_ms": 0}
    events = list(map(json.loads, lines("search", text(SMALL | {"times": times}))))
    assert events[-1]["event"] == "times"
