"""Ops, placements and plans: their text and JSON forms."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate


@given(st.integers(0, 10**6), st.sampled_from(list(OpKind)), st.integers(0, 10**6))
def test_op_text_round_trip(stage: int, kind: OpKind, microbatch: int) -> None:
    op = Op(stage, kind, microbatch)
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F0", "3X0", "3F", "3F-1", " 3F0", "3f0", "3WB0", None, 3])
def test_op_text_refused(text: object) -> None:
    with pytest.raises(PlanError, match="is not an op"):
        Op.parse(text)  # type: ignore[arg-type]


def test_json_has_exactly_the_documented_keys() -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=4)
    costs = CostModel.uniform(plan.placement, comm_ms=0.6)
    body = json.loads(plan.to_json(costs=costs.to_json(), metrics=simulate(plan, costs).metrics()))
    top = ["format", "schedule", "num_ranks", "num_microbatches", "stage_to_rank", "ops", "costs", "metrics"]
    assert list(body) == top
    times = ["forward_ms", "backward_ms", "wgrad_ms", "comm_ms"]
    assert list(body["costs"]) == [*times, "activation", "activation_after_backward"]
    assert list(body["metrics"]) == ["span_ms", "makespan_ms", "bubble_rate", "peak_memory"]
    assert body["format"] == "zerobubble-plan/1"
    assert body["stage_to_rank"] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "zerobubble-plan/3"},
        {"format": None},
        {"num_ranks": 3},
        {"num_ranks": "2"},
        {"num_microbatches": 0},
        {"num_microbatches": True},
        {"stage_to_rank": [0, 2]},
        {"stage_to_rank": [0, -1]},
        {"stage_to_rank": []},
        {"stage_to_rank": "01"},
        {"ops": [["0F0"]]},
        {"ops": [["0F0"], "1F0"]},
        {"ops": [["0F0"], ["1G0"]]},
        {"ops": [["0F0"], [7]]},
        {"ops": None},
        {"schedule": 5},
    ],
)
def test_malformed_json_is_refused(change: dict[str, object]) -> None:
    body = json.loads(build_plan("1f1b", num_ranks=2, num_microbatches=2).to_json())
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(body | change))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", b"\xff\xfe", "[" * 100_000])
def test_a_file_that_is_no_plan_is_refused(text: str | bytes) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_placements() -> None:
    assert Placement.linear(3).stage_to_rank == (0, 1, 2)
    assert Placement.loop(2, 3).stage_to_rank == (0, 1, 0, 1, 0, 1)
    assert Placement.v(3).stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert Placement.v(3).rank_to_stages == ((0, 5), (1, 4), (2, 3))
    assert [Placement.v(3).chunk_of(stage) for stage in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [p.name for p in (Placement.linear(3), Placement.loop(2, 2), Placement.v(2))] == ["linear", "loop", "V"]
    assert Placement((0, 0, 1)).name == "custom"
