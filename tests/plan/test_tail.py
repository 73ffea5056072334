"""Reductions of gradients over replicas beside the last Ws: what is exposed, against stock 1F1B with the same buckets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.tail import Tail, reduced_ms
from megatron.zerobubble.plan.transforms import reductions_beside_tail

SCHEDULES = ("zb-h1", "zb-h2", "zbv", "v-half", "v-min", "zb-interleaved")


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (0.8, 1.0, 1.0)], ids=str)
@pytest.mark.parametrize("per_rank", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.sampled(0.06)
def test_no_schedule_exposes_more_than_1f1b(p: int, per_rank: int, times: tuple[float, float, float]) -> None:
    """A reduction of all gradients of a rank takes 0.5 to 8 times an F of all of its layers."""
    m = per_rank * p
    stock = build_plan("1f1b", num_ranks=p, num_microbatches=m)
    for name in SCHEDULES:
        plan = build_plan(name, num_ranks=p, num_microbatches=m)
        ordered = reductions_beside_tail(plan)
        for reduction_ms in (0.5, 1.0, 2.0, 4.0, 8.0):
            base, before, after = (
                exposed_ms(each, _costs(each, times, reduction_ms), tail)
                for each, tail in ((stock, Tail()), (plan, Tail()), (ordered, None))
            )
            assert after <= base + 1e-9, (name, reduction_ms)
            assert after <= before + 1e-9, (name, reduction_ms)


def test_the_gain_is_a_few_percent_of_an_iteration() -> None:
    """p = 8, m = 24, passes of equal times, and a reduction as long as four: percent of an iteration, as in docs/adr/0057."""
    found = {}
    for name in ("zb-h1", "zb-h2", "zbv"):
        plan = build_plan(name, num_ranks=8, num_microbatches=24)
        costs = _costs(plan, (1.0, 1.0, 1.0), 4.0)
        before = exposed_ms(plan, costs, Tail())
        after = exposed_ms(reductions_beside_tail(plan), costs)
        found[name] = round(100 * (before - after) / (simulate(plan, costs).makespan_ms + before), 1)
    assert found == {"zb-h1": 1.1, "zb-h2": 3.4, "zbv": 1.6}


def exposed_ms(plan: Plan, costs: CostModel, tail: Tail | None = None) -> float:
    """By how much the last reduction ends behind the last op. `Tail()`: all gradients become final in a stage's last op."""
    assert costs.step is not None
    rows = simulate(plan, costs).rows
    return max(reduced_ms(row, costs.step, tail) for row in rows) - max(row[-1].end_ms for row in rows)


def _costs(plan: Plan, times: tuple[float, float, float], reduce_ms: float) -> CostModel:
    forward_ms, backward_ms, wgrad_ms = times
    costs = CostModel.uniform(plan.placement, forward_ms=forward_ms, backward_ms=backward_ms, wgrad_ms=wgrad_ms)
    return replace(costs, step=StepCosts.uniform(plan.placement, reduce_ms=reduce_ms))
