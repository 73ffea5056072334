"""Properties of every schedule family, for any times, any memory and up to 16 ranks."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules, placement_of, schedule_info
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.validate import validate

NAMES = [info.name for info in known_schedules()]
times = st.floats(0.1, 10.0)


@st.composite
def requests(draw: st.DrawFn, most_ranks: int = 16) -> tuple[str, int, int, Placement, CostModel]:
    """A family, p, m up to 3p, and uneven costs."""
    name = draw(st.sampled_from(NAMES))
    p = draw(st.integers(1, most_ranks))
    m = draw(st.integers(1, 3 * p))
    placement = placement_of(name, num_ranks=p)
    lists = [draw(st.lists(times, min_size=placement.num_stages, max_size=placement.num_stages)) for _ in range(4)]
    share = draw(st.floats(0.0, 1.0))
    costs = CostModel(
        forward_ms=tuple(lists[0]),
        backward_ms=tuple(lists[1]),
        wgrad_ms=tuple(lists[2]),
        comm_ms=draw(st.floats(0.0, 3.0)),
        activation=tuple(lists[3]),
        activation_after_backward=tuple(share * whole for whole in lists[3]),
    )
    return name, p, m, placement, costs


@settings(max_examples=60)
@given(requests())
def test_an_order_without_a_search(request: tuple[str, int, int, Placement, CostModel]) -> None:
    """It is complete and valid, not below the lower bound, and unchanged by JSON and text round trips."""
    name, p, m, placement, costs = request
    plan = build_plan(name, num_ranks=p, num_microbatches=m, costs=costs)
    validate(plan)
    assert plan.placement == placement
    assert {op for row in plan.ops for op in row if op.kind is OpKind.F} == {
        Op(stage, OpKind.F, k) for stage in range(placement.num_stages) for k in range(m)
    }
    simulation = simulate(plan, costs)
    bound = lower_bound(placement, m, costs, max(simulation.peak_memory))
    assert simulation.span_ms >= bound.span_ms * (1 - 1e-9)
    assert simulation.makespan_ms >= bound.makespan_ms * (1 - 1e-9)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_text(plan.to_text(), placement=placement, schedule=name, num_microbatches=m) == plan


@settings(max_examples=40)
@given(requests(most_ranks=8), st.sampled_from([1.0, 1.05, 1.5, 3.0]))
def test_within_a_memory_limit(request: tuple[str, int, int, Placement, CostModel], times_least: float) -> None:
    """A searched family fits every feasible limit; a hand-written pattern fits it or raises PlanError."""
    name, p, m, placement, costs = request
    limit = smallest_memory(placement, m, costs) * times_least
    options = SearchOptions(memory_limit=limit, budget=0.0)
    if name in ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2"):
        peak = max(peak_memory(build_plan(name, num_ranks=p, num_microbatches=m, costs=costs), costs))
        if peak > limit + 1e-9:
            with pytest.raises(PlanError, match="memory peaks at"):
                build_plan(name, num_ranks=p, num_microbatches=m, costs=costs, options=options)
            return
    simulation = simulate(build_plan(name, num_ranks=p, num_microbatches=m, costs=costs, options=options), costs)
    assert max(simulation.peak_memory) <= limit + 1e-9


@pytest.mark.parametrize("name", ["zb", "zbv", "v-half", "v-min", "1f1b-v", "zb-interleaved"])
def test_just_too_little_memory_is_refused(name: str) -> None:
    placement = placement_of(name, num_ranks=3)
    costs = CostModel.uniform(placement, forward_ms=3.0, activation_after_backward=0.5)
    least = smallest_memory(placement, 5, costs)
    with pytest.raises(ConfigError, match=f"the smallest that works is {math.ceil(least * 1e6) / 1e6}"):
        build_plan(
            name,
            num_ranks=3,
            num_microbatches=5,
            costs=costs,
            options=SearchOptions(memory_limit=least * 0.99, budget=0.0),
        )
    assert schedule_info(name).name == name
