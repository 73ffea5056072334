"""Passes over plans, and the memory of a plan with and without recomputation."""

from __future__ import annotations

import math

import pytest

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import OpKind, Placement
from megatron.zerobubble.plan.registry import build_plan, known_schedules, schedule_info
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.simulate import memory_over_time, peak_memory, simulate
from megatron.zerobubble.plan.transforms import (
    first_microbatches,
    forward_only,
    reductions_beside_tail,
    split_fused,
)
from megatron.zerobubble.plan.validate import live_microbatches, validate
from tests.support.plans import text_of

NAMES = [info.name for info in known_schedules()]


@pytest.mark.parametrize("name", NAMES)
def test_forward_only_keeps_every_forward_in_order(name: str) -> None:
    plan = build_plan(name, num_ranks=3, num_microbatches=7)
    evaluation = forward_only(plan)
    validate(evaluation, forward_only=True)
    assert evaluation.placement == plan.placement
    assert [list(row) for row in evaluation.ops] == [[op for op in row if op.kind is OpKind.F] for row in plan.ops]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_microbatches_of_a_plan_are_a_plan(name: str) -> None:
    plan = build_plan(name, num_ranks=3, num_microbatches=7)
    for m in range(1, 8):
        fewer = first_microbatches(plan, m)
        validate(fewer)
        assert fewer.num_microbatches == m
        assert all(few <= all_ for few, all_ in zip(live_microbatches(fewer), live_microbatches(plan), strict=True))
    with pytest.raises(PlanError, match="7 microbatches; it cannot be restricted to 8"):
        first_microbatches(plan, 8)


@pytest.mark.parametrize("name", NAMES)
def test_split_fused_leaves_no_bw(name: str) -> None:
    plan = split_fused(build_plan(name, num_ranks=3, num_microbatches=4))
    validate(plan)
    assert not any(op.kind is OpKind.BW for row in plan.ops for op in row)
    assert split_fused(plan) == plan


WITH_RECOMPUTATION = ["zb", "zbv", "v-half", "v-min", "zb-interleaved"]


def _costs(name: str) -> CostModel:
    """Four ranks; B includes the recomputed F, and activation memory after B is three times that after F."""
    kind, chunks = schedule_info(name).placement, schedule_info(name).default_num_chunks
    placement = Placement.v(4) if kind == "V" else Placement.loop(4, chunks)
    return CostModel.uniform(placement, backward_ms=2.0, wgrad_ms=0.75, comm_ms=0.1, activation_after_backward=3.0)


@pytest.mark.parametrize("name", WITH_RECOMPUTATION)
@pytest.mark.parametrize("times", [1.0, 1.5, 4.0])
def test_the_limit_holds_after_every_b(name: str, times: float) -> None:
    costs = _costs(name)
    plan = build_plan(name, num_ranks=4, num_microbatches=8, costs=costs)
    limit = times * smallest_memory(plan.placement, 8, costs)
    plan = build_plan(name, num_ranks=4, num_microbatches=8, costs=costs, options=SearchOptions(memory_limit=limit, budget=2e4))
    validate(plan, memory_limit=limit, costs=costs)
    assert max(peak_memory(plan, costs)) <= limit + 1e-9
    options = SearchOptions(memory_limit=0.99 * smallest_memory(plan.placement, 8, costs))
    with pytest.raises(ConfigError, match="smallest"):
        build_plan(name, num_ranks=4, num_microbatches=8, costs=costs, options=options)


@pytest.mark.parametrize("name", WITH_RECOMPUTATION)
def test_the_default_limit_of_a_schedule_leaves_headroom_for_pending_w(name: str) -> None:
    """Without a limit a family keeps its number of microbatches, each counted at its maximum, so that it is not slower."""
    costs = _costs(name)
    light = costs.with_lists(activation_after_backward=costs.activation)
    plans = [
        build_plan(name, num_ranks=4, num_microbatches=8, costs=each, options=SearchOptions(budget=2e4))
        for each in (costs, light)
    ]
    heavy_ms, light_ms = (simulate(plan, costs).span_ms for plan in plans)
    assert heavy_ms <= 1.05 * light_ms, "a search of few steps"
    assert all(map(math.isfinite, peak_memory(plans[0], costs)))


def test_one_rank_by_hand() -> None:
    plan = build_plan("zb-h1", num_ranks=1, num_microbatches=2)
    costs = CostModel.uniform(plan.placement, activation_after_backward=0.25)
    simulation = simulate(plan, costs)
    assert text_of(plan) == "0F0 0B0 0W0 0F1 0B1 0W1"
    assert memory_over_time(simulation.rows, 2, costs) == (((0, 1), (2, 0.25), (3, 0), (3, 1), (5, 0.25), (6, 0)),)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (4, 4), (4, 9), (8, 24)])
@pytest.mark.parametrize("name", NAMES)
def test_the_order_for_reductions_moves_ws_and_the_last_b_of_stage_0(name: str, p: int, m: int) -> None:
    plan = build_plan(name, num_ranks=p, num_microbatches=m)
    ordered = reductions_beside_tail(plan)
    validate(ordered)
    assert reductions_beside_tail(ordered) == ordered
    for before, after in zip(plan.ops, ordered.ops, strict=True):
        assert len(before) == len(after)
        assert set(before) == set(after)
        assert [op for op in before if op.kind is not OpKind.W] == [op for op in after if op.kind is not OpKind.W]
    for times in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8)):
        costs = CostModel.uniform(plan.placement, forward_ms=times[0], backward_ms=times[1], wgrad_ms=times[2], comm_ms=0.1)
        one, other = simulate(plan, costs), simulate(ordered, costs)
        assert other.makespan_ms <= one.makespan_ms + 1e-9
        assert max(other.peak_memory) <= max(one.peak_memory) + 1e-9


def test_the_stage_that_ends_first_is_complete_first() -> None:
    plan = reductions_beside_tail(build_plan("v-half", num_ranks=4, num_microbatches=8))
    rank_0, rank_1, *_ = text_of(plan).splitlines()
    assert rank_0.endswith(" 7F7 7B7 0B5 7W6 7W7 0W5 0B6 0W6 0B7 0W7")
    assert rank_1.endswith(" 6B7 6W6 6W7 1B6 1W5 1B7 1W6 1W7")
    plan = reductions_beside_tail(build_plan("zbv", num_ranks=2, num_microbatches=1))
    assert text_of(plan).splitlines()[0] == "0F0 3F0 3B0 3W0 0B0 0W0", "the last B of stage 0 and its W come last"
