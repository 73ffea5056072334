"""Plans for stages with activation recomputation: memory after B exceeds that after F, and the limit still holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan, schedule_info
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.validate import validate

NAMES = ["zb", "zbv", "v-half", "v-min", "zb-interleaved"]


def _costs(name: str) -> CostModel:
    """Four ranks; B includes the recomputed F, and activation memory after B is three times that after F."""
    kind, chunks = schedule_info(name).placement, schedule_info(name).default_num_chunks
    placement = Placement.v(4) if kind == "V" else Placement.loop(4, chunks)
    return CostModel.uniform(placement, backward_ms=2.0, wgrad_ms=0.75, comm_ms=0.1, activation_after_backward=3.0)


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_the_default_limit_of_a_schedule_leaves_headroom_for_pending_w(name: str) -> None:
    """Without a limit a family keeps its number of microbatches, each counted at its maximum, so that it is not slower."""
    costs = _costs(name)
    light = replace(costs, activation_after_backward=costs.activation)
    plans = [
        build_plan(name, num_ranks=4, num_microbatches=8, costs=each, options=SearchOptions(budget=2e4))
        for each in (costs, light)
    ]
    heavy_ms, light_ms = (simulate(plan, costs).span_ms for plan in plans)
    assert heavy_ms <= 1.05 * light_ms, "a search of few steps"
    assert all(map(math.isfinite, peak_memory(plans[0], costs)))
