"""Activation memory over time."""

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.simulate import memory_over_time, simulate


def test_one_rank_by_hand() -> None:
    plan = build_plan("zb-h1", num_ranks=1, num_microbatches=2)
    costs = CostModel.uniform(plan.placement, activation_after_backward=0.25)
    simulation = simulate(plan, costs)
    assert plan.to_text() == "0F0 0B0 0W0 0F1 0B1 0W1"
    assert memory_over_time(simulation.rows, 2, costs) == (((0, 1), (2, 0.25), (3, 0), (3, 1), (5, 0.25), (6, 0)),)


@pytest.mark.parametrize("name", [info.name for info in known_schedules()])
def test_the_highest_step_is_the_peak_and_nothing_is_left(name: str) -> None:
    plan = build_plan(name, num_ranks=4, num_microbatches=7)
    costs = CostModel.uniform(plan.placement, backward_ms=1.3, wgrad_ms=0.6, comm_ms=0.1, activation_after_backward=0.4)
    simulation = simulate(plan, costs)
    stairs = memory_over_time(simulation.rows, 7, costs)
    assert tuple(max(memory for _, memory in stair) for stair in stairs) == simulation.peak_memory
    assert all(stair[-1][1] == 0 for stair in stairs)
    assert all(list(stair) == sorted(stair, key=lambda step: step[0]) for stair in stairs)
