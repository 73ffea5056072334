"""The lower bound: below every plan, tight for the closed forms, and compared with an exact solver on small instances."""

import math

import pytest
from hypothesis import given

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.search.bound import lower_bound
from megatron.zerobubble.plan.search.search import Objective, SearchOptions, search
from megatron.zerobubble.plan.simulate import simulate
from tests.plan.exact import optimum
from tests.plan.search.test_search import COMPILED, problems


@given(problems())
def test_no_plan_is_below_the_bound(problem: tuple[Placement, int, CostModel, float]) -> None:
    placement, m, costs, limit = problem
    for within in (limit, None):
        plan = search("any", placement, m, costs, SearchOptions(memory_limit=within, budget=0.0))
        simulation = simulate(plan, costs)
        bound = lower_bound(placement, m, costs, within)
        assert bound.span_ms <= simulation.span_ms * (1 + 1e-6) + 1e-6
        assert bound.makespan_ms <= simulation.makespan_ms * (1 + 1e-6) + 1e-6
        assert bound.span_ms <= bound.makespan_ms * (1 + 1e-12)
        assert bound.gap(simulation.span_ms) >= -1e-6
        assert bound.makespan_gap(simulation.makespan_ms) >= -1e-6


@pytest.mark.parametrize("name", [info.name for info in known_schedules()])
def test_every_family_is_above_its_bound(name: str) -> None:
    for p in (1, 2, 4, 6):
        for m in (1, p, 3 * p):
            plan = build_plan(name, num_ranks=p, num_microbatches=m)
            costs = CostModel.uniform(plan.placement, comm_ms=0.1, activation_after_backward=0.4)
            simulation = simulate(plan, costs)
            bound = lower_bound(plan.placement, m, costs, max(simulation.peak_memory))
            assert bound.span_ms <= simulation.span_ms + 1e-6
            assert bound.makespan_ms <= simulation.makespan_ms + 1e-6
            assert bound.bubble_rate <= simulation.bubble_rate + 1e-6


def test_the_bound_is_tight_for_schedules_without_a_bubble() -> None:
    """ZBV at 1F1B's memory has no bubble, and neither has the bound; less memory raises it."""
    placement = Placement.v(4)
    costs = CostModel.uniform(placement)
    assert lower_bound(placement, 8, costs, 1.0).span_ms == pytest.approx(24)
    spans = [lower_bound(placement, 8, costs, limit).span_ms for limit in (1.0, 0.75, 0.5, 0.25)]
    assert spans == sorted(spans)
    assert spans[-1] > 1.5 * spans[0]
    nothing = CostModel.uniform(placement, forward_ms=0, backward_ms=0, wgrad_ms=0)
    assert lower_bound(placement, 8, nothing).bubble_rate == 0
    assert lower_bound(placement, 8, nothing).gap(0.0) == 0


@pytest.mark.parametrize(
    ("p", "m", "limit", "forward", "backward", "wgrad", "comm", "kept"),
    [
        (4, 8, 1.0, 18.522, 18.086, 9.337, 0.601, 0.3664),
        (4, 8, 0.75, 18.522, 18.086, 9.337, 0.601, 0.3664),
        (8, 24, 1.0, 29.718, 29.444, 19.927, 0.527, 0.4324),
        (16, 48, 1.0, 11.347, 11.248, 8.132, 0.377, 0.4324),
    ],
)
def test_a_plan_is_proven_to_be_the_best(
    p: int, m: int, limit: float, forward: float, backward: float, wgrad: float, comm: float, kept: float
) -> None:
    """For the published times of three models."""
    placement = Placement.v(p)
    costs = CostModel.uniform(
        placement,
        forward_ms=forward,
        backward_ms=backward,
        wgrad_ms=wgrad,
        comm_ms=comm,
        activation_after_backward=kept,
    )
    plan = build_plan("zbv", num_ranks=p, num_microbatches=m, costs=costs, options=SearchOptions(memory_limit=limit, budget=3e7))
    assert simulate(plan, costs).span_ms == pytest.approx(lower_bound(placement, m, costs, limit).span_ms, rel=1e-8)


@pytest.mark.skipif(not COMPILED, reason="takes the compiled core")
@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize(
    ("placement", "m", "times", "limit"),
    [
        (Placement.linear(2), 4, (2, 2, 1), 1.0),
        (Placement.linear(3), 4, (3, 2, 2), 1.0),
        (Placement.linear(3), 3, (2, 3, 1), 2 / 3),
        (Placement.v(2), 3, (4, 4, 2), 1.0),
        pytest.param(Placement.v(2), 4, (4, 6, 2), 0.75, marks=pytest.mark.slow),
        (Placement.loop(2, 2), 3, (4, 4, 2), 1.0),
    ],
)
def test_against_the_exact_solver(
    placement: Placement, m: int, times: tuple[int, int, int], limit: float, objective: Objective
) -> None:
    """The optimum lies between the bound and what the search finds, and the search is within 2 % of it."""
    pytest.importorskip("ortools")
    costs = CostModel.uniform(
        placement,
        forward_ms=times[0],
        backward_ms=times[1],
        wgrad_ms=times[2],
        comm_ms=1,
        activation_after_backward=0.5,
    )
    best = optimum(placement, m, costs, limit, makespan=objective is Objective.MAKESPAN)
    bound = lower_bound(placement, m, costs, limit)
    plan = search("x", placement, m, costs, SearchOptions(memory_limit=limit, objective=objective, budget=3e7))
    found = objective.of(simulate(plan, costs))
    assert math.floor(objective.of(bound)) <= best <= found + 1e-6
    assert found <= 1.02 * best
