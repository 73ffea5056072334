"""The sentence about an opened file: the run, the plan, 1F1B, and the rank with the most work."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.playground.models.presets import layered
from megatron.zerobubble.playground.opened_files import open_file
from megatron.zerobubble.playground.tasks import run_task
from megatron.zerobubble.profiling.report import RankMemory, report, reports_to_json
from tests.profiling.support import run_as_simulated

EVEN = CostModel.uniform(Placement.v(2), forward_ms=40.0, backward_ms=40.0, wgrad_ms=40.0)
UNEVEN = EVEN.with_lists(forward_ms=(200.0, 20.0, 20.0, 20.0))


def opened(body: Any) -> dict[str, Any]:
    return open_file((body if isinstance(body, str) else json.dumps(body)).encode())


@pytest.mark.parametrize("kind", ["report", "trace"])
def test_a_recorded_run_is_set_beside_its_plan_1f1b_and_the_rank_with_most_work(kind: str) -> None:
    run = run_as_simulated(build_plan("zbv", num_ranks=2, num_microbatches=6), UNEVEN)
    found = opened(reports_to_json([report(run)]) if kind == "report" else render_trace([run]))
    fused = build_plan("1f1b", num_ranks=2, num_microbatches=6)
    took, classic = report(run).makespan_ms, simulate(fused, UNEVEN.merged(2)).makespan_ms
    assert found["verdict"] == (
        f"your run took {took:,.0f} ms; the plan takes {took:,.0f} ms; 1F1B would take {classic:,.0f} ms; "
        "rank 0 has 2.5 times rank 1's work: balance the stages"
    )


def test_a_comparison_has_the_times_of_its_contenders() -> None:
    rows = [{"name": "stock", "ms": {"value": 3607.2}}, {"name": "zbv", "ms": {"value": 3150}}, {"name": "lost", "ms": None}, 7]
    costs = CostModel.uniform(Placement.v(2), forward_ms=40.0)
    found = opened({"contenders": rows, "num_ranks": 2, "num_microbatches": 6, "costs": costs.to_json()})
    assert found["verdict"].startswith("stock 3,607 ms, zbv 3,150 ms; 1F1B would take ")
    for odd in (None, 3, [[1]], [{"name": 3, "ms": {"value": "x"}}], [{"name": "a", "ms": {"value": float("nan")}}]):
        body = {"contenders": odd, "num_ranks": 2, "num_microbatches": 6, "costs": costs.to_json()}
        assert opened(body)["verdict"].startswith("1F1B would take ")


def test_layers_are_a_model() -> None:
    found = opened(layered("Kimi-K2").to_json())
    assert (found["kind"], found["verdict"]) == ("model", "61 layers")
    assert found["layers"] == layered("Kimi-K2").to_json()


GIB = 2**30


def with_memory(*, is_cpu: bool = False) -> tuple[str, list[RankMemory]]:
    """The report of a run under ZBV that measured its memory: 2 GiB per unit of the plan's, and different weights."""
    seen = report(run_as_simulated(build_plan("zbv", num_ranks=2, num_microbatches=6), UNEVEN))
    seen = replace(seen, measured_bytes=None if is_cpu else [9 * GIB] * 2)
    memory = [
        RankMemory(
            predicted_bytes=int(2 * GIB * peak),
            measured_bytes=int(2 * GIB * peak),
            workspace_bytes=GIB // 4,
            state_bytes=(3 + rank) * GIB,
        )
        for rank, peak in enumerate(seen.simulation.peak_memory)
    ]
    return reports_to_json([seen], memory), memory


def test_the_memory_of_a_run_is_that_of_its_plan_and_of_no_other_number_of_stages() -> None:
    text, measured = with_memory()
    found = opened(text)
    given = {"num_ranks": 2, "num_microbatches": 6, "stages": found["costs"], "run_memory": found["memory"] | {"device_gib": 79}}
    *_, best, _ = run_task("search", json.dumps(given | {"schedule": "zbv", "effort": "drawn"}))
    memory, peaks = best["drawing"]["memory"], best["drawing"]["metrics"]["peak_memory"]
    assert memory["device_bytes"] == 79 * GIB
    for rank, each in enumerate(measured):
        planned = memory["static_bytes"][rank] + memory["unit_bytes"] * peaks[rank]
        assert planned == pytest.approx(each.state_bytes + each.workspace_bytes + each.measured_bytes)
    *_, best, _ = run_task("search", json.dumps(given | {"schedule": "1f1b", "effort": "drawn"}))
    assert best["drawing"]["memory"] is None
    on_cpu = given | {"run_memory": opened(with_memory(is_cpu=True)[0])["memory"], "schedule": "zbv", "effort": "drawn"}
    *_, best, _ = run_task("search", json.dumps(on_cpu))
    assert best["drawing"]["memory"]["device_bytes"] is None
    body = json.loads(text)
    assert opened(body | {"memory": None})["memory"] is None
    assert opened(body | {"memory": []})["memory"] is None
    with pytest.raises(ConfigError, match="the report's measured_bytes is None"):
        opened(body | {"memory": [3, {}]})
