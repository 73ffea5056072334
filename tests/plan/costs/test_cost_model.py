"""The cost model: scaling to stages, checks, JSON."""

import dataclasses
import json
import math
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import OpKind, Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate


def test_uniform_gives_each_chunk_its_part_of_a_rank() -> None:
    costs = CostModel.uniform(Placement.v(2), forward_ms=4, backward_ms=6, wgrad_ms=2, comm_ms=0.5, activation_after_backward=0.4)
    assert costs.forward_ms == (2, 2, 2, 2)
    assert costs.backward_ms == (3, 3, 3, 3)
    assert costs.wgrad_ms == (1, 1, 1, 1)
    assert costs.comm_ms == 0.5
    assert costs.activation == (0.5, 0.5, 0.5, 0.5)
    assert costs.activation_after_backward == (0.2, 0.2, 0.2, 0.2)
    assert costs.duration_ms(0, OpKind.BW) == 4


def test_json_round_trip() -> None:
    costs = CostModel.uniform(Placement.linear(3), forward_ms=1.5, comm_ms=0.1)
    assert CostModel.from_json(json.loads(json.dumps(costs.to_json()))) == costs


@pytest.mark.parametrize("name", ["forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "activation_after_backward"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None, True])
def test_impossible_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*must be a finite number"):
        CostModel.uniform(Placement.linear(2), **{name: value})


@pytest.mark.parametrize("value", [10**400, 1e308, 1.01e12])
def test_a_number_with_which_sums_overflow_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"forward_ms is 1.*must be a finite number from 0 to 1e\+12"):
        CostModel.uniform(Placement.linear(2), forward_ms=value)


def test_times_or_memory_that_are_all_almost_0_are_refused() -> None:
    small = {"forward_ms": 5e-324, "backward_ms": 1e-300, "wgrad_ms": 0.0}
    with pytest.raises(ConfigError, match="the largest value of forward_ms, backward_ms, wgrad_ms is 1e-300; it must be"):
        CostModel.uniform(Placement.linear(2), **small)
    assert CostModel.uniform(Placement.linear(2), **small | {"wgrad_ms": 1e-6}).forward_ms == (5e-324, 5e-324), "rounding noise"
    body = CostModel.uniform(Placement.linear(2)).to_json() | {"activation": [1e-20] * 2, "activation_after_backward": [0, 0]}
    with pytest.raises(ConfigError, match="the largest value of activation, activation_after_backward is 1e-20"):
        CostModel.from_json(body)


@pytest.mark.parametrize("value", [-1.0, math.nan, "1", None])
def test_a_bad_stage_is_named(value: Any) -> None:
    body = CostModel.uniform(Placement.linear(3)).to_json()
    body["wgrad_ms"][1] = value
    with pytest.raises(ConfigError, match="wgrad_ms of stage 1"):
        CostModel.from_json(body)


def test_lengths_must_agree() -> None:
    body = CostModel.uniform(Placement.linear(3)).to_json()
    body["backward_ms"].pop()
    with pytest.raises(ConfigError, match="forward_ms has 3 stages and backward_ms has 2"):
        CostModel.from_json(body)


def test_no_stage_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one stage"):
        CostModel(forward_ms=(), backward_ms=(), wgrad_ms=(), activation=(), activation_after_backward=())


@pytest.mark.parametrize("body", [None, [], {}, {"forward_ms": 1.0}, {"forward_ms": [1.0]}])
def test_malformed_json_is_refused(body: Any) -> None:
    with pytest.raises(PlanError, match="costs"):
        CostModel.from_json(body)


def test_a_recomputing_stage_needs_more_memory_after_b_and_reserves_it() -> None:
    costs = CostModel.uniform(Placement.linear(2))
    assert costs.reserved is costs
    recomputing = dataclasses.replace(costs, activation=(0.25, 1.0), activation_after_backward=(0.5, 0.75))
    assert recomputing.reserved == dataclasses.replace(recomputing, activation=(0.5, 1.0))


def test_costs_of_another_model_are_refused() -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=4)
    with pytest.raises(PlanError, match="for 2 stages and the plan has 4"):
        simulate(plan, CostModel.uniform(Placement.linear(2)))
