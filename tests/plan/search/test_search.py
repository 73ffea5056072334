"""The search: any times, any memory limit, the published bubbles and memory."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import CostTable
from megatron.zerobubble.plan.generators.building_blocks import grid_blocks, grid_order
from megatron.zerobubble.plan.generators.zbv import zbv_pattern
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import build_plan, schedule_info
from megatron.zerobubble.plan.search.core import Core
from megatron.zerobubble.plan.search.interface import Problem, flat_durations
from megatron.zerobubble.plan.search.orders import CYCLE_AT, repeated, seed_order_of
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.validate import validate
from tests.plan.uneven_costs import uneven_costs

SEARCHED = ["zb", "zbv", "v-half", "v-min", "1f1b-v", "zb-interleaved"]
MEASURED = {
    "forward_ms": 29.718,
    "backward_ms": 29.444,
    "wgrad_ms": 19.927,
    "comm_ms": 0.527,
    "activation_after_backward": 0.4324,
}
"""The 6.2B model of arXiv 2401.10241, Table 9."""

times = st.just(0.0) | st.floats(1e-9, 10.0)
"""As `CostModel` takes them: the largest is 0, or 1e-9 and more."""


def placement_of(name: str, p: int, v: int) -> Placement:
    kind = schedule_info(name).placement
    return Placement.v(p) if kind == "V" else Placement.loop(p, v if kind == "loop" else 1)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Placement, int, CostModel, float]:
    """A placement, m, uneven costs, some of unequal slices with keys and values, and a limit from the smallest that works."""
    p = draw(st.integers(1, 5))
    v = draw(st.integers(1, 3))
    placement = draw(st.sampled_from([Placement.linear(p), Placement.v(p), Placement.loop(p, v)]))
    m = draw(st.integers(1, 3 * p))
    costs = uneven_costs(draw, placement.num_stages, times)
    num_slices = draw(st.sampled_from([1, 1, 2, 4]))
    if num_slices > 1:
        costs = of_unequal_slices(draw, costs, num_slices)
    limit = smallest_memory(placement, m, costs) * draw(st.sampled_from([1.0, 1.0, 1.1, 1.7, 3.0]))
    return placement, m, costs, limit


def of_unequal_slices(draw: st.DrawFn, costs: CostModel, num_slices: int) -> CostModel:
    """Each slice takes a whole multiple of the given times and memory, and a stage has keys and values of its own, or none."""
    weights = [draw(st.lists(st.sampled_from([0, 1, 1, 2]), min_size=num_slices, max_size=num_slices)) for _ in range(4)]
    lists = zip(costs.lists.items(), [*weights, weights[3]], strict=True)
    rows = {name: tuple(tuple(value * weight for weight in each) for value in values) for (name, values), each in lists}
    share = draw(st.sampled_from([0.0, 0.3]))
    keys = {name: tuple(share * value for value in costs.activation) for name in ("keys", "key_gradients")}
    return replace(costs, table=CostTable.of_slices(rows, **keys))


@given(problems(), st.sampled_from(list(Objective)))
def test_any_problem_has_a_valid_plan_within_its_memory(
    problem: tuple[Placement, int, CostModel, float], objective: Objective
) -> None:
    placement, m, costs, limit = problem
    options = SearchOptions(memory_limit=limit, objective=objective, budget=2e5)
    plan = search("any", placement, m, costs, options)
    validate(plan, memory_limit=limit, costs=costs)
    simulate(plan, costs)


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize(("p", "m", "comm_ms"), [(1, 30, 0.0), (2, 40, 0.5), (3, 31, 20.0)])
def test_more_microbatches_than_the_smaller_instance(name: str, p: int, m: int, comm_ms: float) -> None:
    """The unrolled plan is complete, whether the order of the smaller instance has a cycle or not."""
    placement = placement_of(name, p, 2)
    costs = CostModel.uniform(placement, **MEASURED | {"comm_ms": comm_ms})
    for limit in (0.75, 1.5):
        options = SearchOptions(memory_limit=max(limit, smallest_memory(placement, m, costs)), budget=4e5)
        validate(build_plan(name, num_ranks=p, num_microbatches=m, costs=costs, options=options))


def test_a_cycle_of_slices_is_of_a_whole_microbatch() -> None:
    """Two slices: a run that has every code twice, so that the slices behind the repeated ones stay the same."""
    row = bytes([0, 0, 0, 1, 0, 1, 0, 1, 1])
    assert repeated([row], 1, num_slices=2) == [[bytes([0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1])]] * len(CYCLE_AT)
    assert repeated([bytes([0, 0, 0, 1, 1, 1])], 1, num_slices=4) == [[]] * len(CYCLE_AT)


@pytest.mark.parametrize(("name", "slices_beyond"), [("zb", 8), ("zbv", 8), ("v-half", 5), ("v-min", 4)])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_memory_of_slices_shrinks_as_that_of_1f1b(name: str, slices_beyond: int, n: int) -> None:
    """p=8: a number of slices and n-1 more, where 1F1B over slices has 8 and n-1 more; and the bubble shrinks."""
    plan = build_plan(name, num_ranks=8, num_microbatches=16, num_slices=n)
    simulation = simulate(plan, CostModel.uniform(plan.placement))
    assert plan.num_slices == n
    assert max(simulation.peak_memory) == pytest.approx((slices_beyond + n - 1) / n / 8)
    assert simulation.bubble_rate <= {1: 0.24, 2: 0.18, 8: 0.1}[n]


@pytest.mark.parametrize("name", ["zb", "zbv", "v-half"])
def test_a_limit_below_one_microbatch_with_all_its_slices_is_refused_with_the_smallest(name: str) -> None:
    placement = placement_of(name, 4, 2)
    even = CostModel.uniform(placement).divided(8)
    keys = ((0.04 / placement.num_chunks,),) * placement.num_stages
    costs = replace(even, table=replace(even.table, keys=keys, key_gradients=keys))

    def within(limit: float) -> Plan:
        options = SearchOptions(memory_limit=limit, budget=0.0)
        return build_plan(name, num_ranks=4, num_microbatches=4, num_slices=8, costs=costs, options=options)

    with pytest.raises(ConfigError, match=r"memory limit 0\.26 .* the smallest that works is 0\.27$") as caught:
        within(0.26)
    assert "\n" not in str(caught.value)
    assert max(peak_memory(within(0.27), costs)) == pytest.approx(0.27)


def test_the_repeated_cycle_is_the_nearest_to_each_share() -> None:
    """Six codes in a cycle that changes half of the way through: early shares repeat the first, late ones the second."""
    row = bytes([0, 1, 2, 3, 4, 5] * 5 + [3, 4, 5, 0, 2, 1] * 5)
    early, *_, late = (rows[0] for rows in repeated([row], 1))
    assert early == bytes([0, 1, 2, 3, 4, 5] * 6 + [3, 4, 5, 0, 2, 1] * 5)
    assert late == bytes([0, 1, 2, 3, 4, 5] * 5 + [3, 4, 5, 0, 2, 1] * 6)


@pytest.mark.parametrize("name", ["v-half", "v-min", "1f1b-v"])
def test_the_memory_points(name: str) -> None:
    """Peak memory in microbatches for p=1..12: half, a third and about two thirds of 1F1B's."""
    points = {
        "v-half": [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7],
        "v-min": [1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5],
        "1f1b-v": [1, 2, 2.5, 3.5, 4.5, 4.5, 5.5, 6.5, 6.5, 7.5, 8.5, 8.5],
    }
    for p, point in enumerate(points[name], start=1):
        plan = build_plan(name, num_ranks=p, num_microbatches=2 * p)
        assert max(peak_memory(plan, CostModel.uniform(plan.placement))) * p <= point


def test_the_same_seed_gives_the_same_plan_and_more_budget_no_worse_a_start() -> None:
    placement = Placement.v(4)
    costs = CostModel.uniform(placement, **MEASURED)

    def plan_of(seed: int) -> Plan:
        return search("x", placement, 8, costs, SearchOptions(memory_limit=0.75, seed=seed, budget=3e5))

    assert plan_of(3) == plan_of(3)
    pattern = zbv_pattern(4, 8)
    for objective in Objective:
        options = SearchOptions(memory_limit=1.0, objective=objective, budget=3e5)
        found = search("x", placement, 8, costs, options, seed_orders=[seed_order_of(lambda m: zbv_pattern(4, m))])
        assert objective.of(simulate(found, costs)) <= objective.of(simulate(pattern, costs)) + 1e-9


@pytest.mark.parametrize(
    ("name", "limit", "reference", "budget"),
    [("zb", 1.0, 0.1323, 6e7), ("zb", 1.9831, 0.0029, 6e7), ("v-half", 0.625, 0.1447, 4e8), ("v-min", 0.5, 0.2721, 6e7)],
)
def test_no_worse_than_the_published_scheduler(name: str, limit: float, reference: float, budget: float) -> None:
    """p=8, m=24, the 6.2B model: bubble rates of the reference scheduler, at its own peak memory."""
    placement = placement_of(name, 8, 1)
    costs = CostModel.uniform(placement, **MEASURED)
    options = SearchOptions(memory_limit=limit, budget=budget)
    plan = build_plan(name, num_ranks=8, num_microbatches=24, costs=costs, options=options)
    assert round(simulate(plan, costs).bubble_rate, 4) <= reference


def test_a_hand_written_pattern_is_checked_against_the_limit() -> None:
    with pytest.raises(PlanError, match="memory peaks at"):
        build_plan("zb-h2", num_ranks=4, num_microbatches=8, options=SearchOptions(memory_limit=1.0))
    with pytest.raises(ConfigError, match="memory limit is nan"):
        build_plan("zbv", num_ranks=4, num_microbatches=8, options=SearchOptions(memory_limit=math.nan))
    with pytest.raises(PlanError, match="one value per stage"):
        build_plan("1f1b", num_ranks=4, num_microbatches=8, costs=CostModel.uniform(Placement.v(4)))


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_grid_blocks_are_steady(p: int) -> None:
    """For F=B=W: no idle time in the steady state, so what 3p more microbatches add to the span is exactly their work."""
    blocks = grid_blocks(p)
    assert len(blocks) > 5
    placement = Placement.v(p)
    costs = CostModel.uniform(placement, forward_ms=2.0, backward_ms=2.0, wgrad_ms=2.0)
    for block in blocks[:: max(1, len(blocks) // 12)]:
        spans = []
        for m in (6 * p, 9 * p):
            stored = costs.activation
            core = Core(Problem(m, placement.stage_to_rank, flat_durations(costs), 0.0, stored, stored, 1e9, False))
            assert all(row.count(code) == m for row in grid_order(block, m) for code in range(6))
            spans.append(core.evaluate(grid_order(block, m))[1])
        assert spans[1] - spans[0] == pytest.approx(3 * p * 6.0)


def test_fill_inserts_w_into_bubbles_and_under_a_memory_limit() -> None:
    """Two stages on one rank each; F, B, W take 1, the link 5: rank 1 waits 5 for nothing, rank 0 for its B's."""
    core = Core(Problem(2, [0, 1], [1.0] * 6, 5.0, [1.0] * 2, [0.5] * 2, 9.0, False))
    rows = [bytes([0, 0, 1, 1]), bytes([0, 1, 0, 1])]
    assert core.fill(rows, [0.5, 0.5]) == [bytes([0, 0, 1, 2, 1, 2]), bytes([0, 1, 0, 1, 2, 2])]
    tight = Core(Problem(2, [0, 1], [1.0] * 6, 5.0, [1.0] * 2, [0.5] * 2, 1.0, False))
    assert tight.fill(rows, [math.inf] * 2) == []
    assert tight.fill([bytes([0, 1, 0, 1])] * 2, [math.inf] * 2) == [bytes([0, 1, 2, 0, 1, 2])] * 2


def test_an_order_that_deadlocks_is_infinitely_bad() -> None:
    core = Core(Problem(1, [0, 0], [1.0] * 6, 0.0, [1.0] * 2, [1.0] * 2, 9.0, False))
    good = bytes([0, 3, 4, 1, 2, 5])
    assert core.evaluate([good])[1] == 6.0
    bad = bytearray(good)
    bad[0], bad[1] = bad[1], bad[0]
    assert core.evaluate([bytes(bad)]) == (math.inf, math.inf)
