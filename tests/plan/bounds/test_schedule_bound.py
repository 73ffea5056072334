"""The lower bound: below every plan, tight for the closed forms, and compared with exact optima of small instances."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostTable
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import build_plan, placement_of
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from tests.plan import optima
from tests.plan.every_order import shortest, slices_of
from tests.plan.search.test_search import problems

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "lower bounds of spans and makespans: below every plan found, with fused and split backwards, recomputation, unequal "
    "stages, links and microbatches; below 155 exact optima of up to four ranks and twelve microbatches, and below the best of "
    "all orders of tiny instances, sliced ones among them",
    "works, equal to the optimum in 99",
    also=("plan/costs/test_unequal_costs.py",),
)


def _heavier(costs: CostModel) -> CostModel:
    """The costs with the activation memory of the stages a little unequal."""
    return costs.with_lists(activation=tuple(value * (1 + 0.001 * stage) for stage, value in enumerate(costs.activation)))


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


def test_a_fused_backward_with_recomputation_is_above_its_bound() -> None:
    """A fused BW never holds what B would leave for W, which with recomputation is more than F leaves."""
    for name, p, m in (("1f1b", 1, 1), ("1f1b", 3, 5), ("interleaved-1f1b", 2, 4), ("1f1b-v", 2, 3)):
        plan = build_plan(name, num_ranks=p, num_microbatches=m)
        costs = CostModel.uniform(plan.placement, activation_after_backward=2.0)
        simulation = simulate(plan, costs)
        bound = lower_bound(plan.placement, m, costs, max(simulation.peak_memory))
        assert bound.span_ms <= simulation.span_ms + 1e-6
        assert bound.makespan_ms <= simulation.makespan_ms + 1e-6


def test_a_fused_backward_without_activations_has_a_bound() -> None:
    """A BW never holds what B would leave for W, so the memory that its plan needs may be none at all."""
    plan = build_plan("1f1b", num_ranks=2, num_microbatches=3)
    costs = CostModel.uniform(plan.placement).with_lists(activation=(0.0, 0.0))
    simulation = simulate(plan, costs)
    assert max(simulation.peak_memory) == 0.0
    bound = lower_bound(plan.placement, 3, costs, 0.0)
    assert 0 < bound.span_ms <= simulation.span_ms


def test_no_optimum_is_below_the_bound() -> None:
    """Of small instances solved exactly, and how often the bound is the optimum itself."""
    known = optima.read()
    assert len(known) >= 100
    tight = 0
    for instance in known:
        assert instance.optimum is not None
        objective = Objective(instance.objective)
        bound = objective.of(lower_bound(instance.stages(), instance.num_microbatches, instance.costs(), instance.limit))
        assert bound <= instance.optimum * (1 + 1e-6), instance
        tight += bound >= instance.optimum * (1 - 1e-6)
    assert tight >= 0.6 * len(known), f"{tight} of {len(known)}"


@st.composite
def tiny_problems(draw: st.DrawFn) -> tuple[Placement, int, CostModel]:
    """Any placement of a few stages, with odd costs: times of 0, more memory after B than before, unequal microbatches, links."""
    rank_of = draw(st.sampled_from([[0], [0, 0], [0, 1], [1, 0], [0, 1, 0], [0, 1, 1], [0, 1, 2], [0, 1, 1, 0], [0, 1, 0, 1]]))
    placement, stages = Placement(tuple(rank_of)), len(rank_of)
    n = draw(st.sampled_from([n for n in (1, 1, 2, 3) if n == 1 or n * stages <= 6]))
    m = draw(st.integers(1, (5 if n == 1 else 6) // stages // n))
    is_equal = draw(st.booleans())
    numbers = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 5.0])
    width = m if n == 1 else n
    lists = {}
    for name in COST_LISTS:
        rows = [tuple(draw(st.lists(numbers, min_size=width, max_size=width))) for _ in rank_of]
        lists[name] = tuple([(rows[0][0],) * width for _ in rank_of] if is_equal else rows)
    comm_ms = draw(st.sampled_from([0.0, 1.0, 4.0]))
    if n > 1:
        keys, gradients = ([0.0 if is_equal else draw(numbers) for _ in rank_of] for _ in range(2))
        slices = CostTable.of_slices(lists, keys=tuple(keys), key_gradients=tuple(gradients))
        if draw(st.booleans()):
            return placement, m, CostModel(table=slices, comm_ms=comm_ms)
        every = [slices]  # microbatches of their own lengths
        for count in draw(st.lists(st.integers(1, n), max_size=6 // stages - n)):
            shorter = _first_slices(slices, count, draw(numbers))
            if sum(each.num_slices for each in (*every, shorter)) * stages <= 6:
                every.append(shorter)
        return placement, len(every), CostModel(table=CostTable.joined(every), comm_ms=comm_ms)
    p = placement.num_ranks
    if p == 1 or draw(st.booleans()):
        return placement, m, CostModel.of(CostTable.of_microbatches(lists), comm_ms=comm_ms)
    speeds = st.sampled_from([0.5, 1.0, 4.0])
    latency, speed = (tuple(tuple(draw(each) for _ in range(p)) for _ in range(p)) for each in (numbers, speeds))
    links = Links(latency_ms=latency, gigabytes_per_s=speed, message_bytes=tuple(1e6 * draw(numbers) for _ in range(m)))
    return placement, m, CostModel.of(CostTable.of_microbatches(lists), links=links)


def _first_slices(slices: CostTable, count: int, more: float) -> CostTable:
    """Those of a shorter microbatch, whose first one takes more memory."""
    cut = {name: tuple(row[:count] for row in getattr(slices, name)) for name in COST_LISTS}
    cut["activation"] = tuple((row[0] + more, *row[1:]) for row in cut["activation"])
    return replace(slices, slices=count, **cut)


def _equal(rank_of: tuple[int, ...], m: int, *values: float) -> tuple[Placement, int, CostModel]:
    """Stages and microbatches that are all alike."""
    lists = {name: [value] * len(rank_of) for name, value in zip(COST_LISTS, values, strict=True)}
    return Placement(rank_of), m, CostModel.of_lists(lists, comm_ms=1.0)


@settings(max_examples=300)
@example(_equal((0, 1), 2, 4.0, 4.0, 4.0, 1.0, 4.0), 0.3, Objective.MAKESPAN)  # only fused BW fit the memory
@example(_equal((0,), 2, 3.0, 0.0, 1.0, 1.0, 3.0), 2 / 3, Objective.SPAN)
@given(tiny_problems(), st.sampled_from([0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 20.0]), st.sampled_from(list(Objective)))
def test_no_order_is_below_the_bound(problem: tuple[Placement, int, CostModel], times: float, objective: Objective) -> None:
    """Of all orders of a tiny instance, every one tried."""
    placement, m, costs = problem
    largest = max(max(row) for name in COST_LISTS[3:] for row in costs.rows(name))
    limit = max(slices_of(costs, m)) * times * largest + 1e-9
    best = shortest(costs, placement, m, limit, objective)
    if best < math.inf:
        assert objective.of(lower_bound(placement, m, costs, limit / min(placement.num_ranks, m))) <= best + 1e-6


@pytest.mark.parametrize("index", range(0, 155, 5))
@pytest.mark.sampled(0.2)
def test_a_search_finds_the_optimum_within_2_percent(index: int) -> None:
    instance = optima.read()[index]
    assert instance.optimum is not None
    objective, costs = Objective(instance.objective), instance.costs()
    options = SearchOptions(memory_limit=instance.limit, objective=objective, budget=3e7)
    found = objective.of(simulate(search("x", instance.stages(), instance.num_microbatches, costs, options), costs))
    assert instance.optimum * (1 - 1e-6) <= found <= 1.02 * instance.optimum


V_MIN = CostModel.uniform(
    Placement.v(16), forward_ms=11.3, backward_ms=11.3, wgrad_ms=8.1, comm_ms=0.38, activation_after_backward=0.4324
)


@pytest.mark.parametrize(
    ("ms", "placement", "m", "costs", "limit"),
    [
        (27.0, Placement.linear(4), 8, CostModel.uniform(Placement.linear(4)), 1.0),
        (8.5, Placement.v(2), 1, _heavier(CostModel.uniform(Placement.v(2), comm_ms=1.0)), 4.0),
        (14.0, Placement.linear(3), 3, CostModel.uniform(Placement.linear(3), wgrad_ms=0.0, comm_ms=1.0), 3.0),
        (81.7, Placement.v(8), 24, CostModel.uniform(Placement.v(8), comm_ms=0.1), 0.75),
        (56.0, Placement.linear(2), 8, CostModel.uniform(Placement.linear(2), comm_ms=1.0), 0.5),
        (4544.933673, Placement.v(16), 128, V_MIN, 0.375),
        (27.5, Placement.linear(3), 1, CostModel.uniform(Placement.linear(3), comm_ms=1.0), 0.4),
        (4560.332138, Placement.v(16), 128, _heavier(V_MIN), 0.375),
    ],
    ids=[
        "work and idle ends",
        "one microbatch",
        "travel, work, travel",
        "round trip, free memory, round trip",
        "passes in flight times time",
        "travel, passes in flight times time, travel",
        "memory times time",
        "travel, memory times time, travel",
    ],
)
def test_every_argument_gives_the_bound_somewhere(
    ms: float, placement: Placement, m: int, costs: CostModel, limit: float
) -> None:
    bound = lower_bound(placement, m, costs, limit)
    assert (bound.span_ms, bound.makespan_ms) == pytest.approx((ms, ms), rel=1e-8)


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


@pytest.mark.parametrize(("name", "p", "m", "n"), [("zb", 4, 8, 2), ("zb", 4, 8, 8), ("zb", 8, 16, 2), ("zbv", 4, 8, 4)])
def test_a_plan_of_slices_is_proven_to_be_the_best(name: str, p: int, m: int, n: int) -> None:
    """At the memory of 1F1B over slices: for F=B=W and, on a linear placement, with keys and values."""
    even = CostModel.uniform(placement_of(name, num_ranks=p)).divided(n)
    keys = ((0.05,),) * even.num_stages
    heavy = replace(even, table=replace(even.table, keys=keys, key_gradients=keys))
    for costs in (even, heavy) if name == "zb" else (even,):
        options = SearchOptions(budget=3e6, objective=Objective.MAKESPAN)
        plan = build_plan(name, num_ranks=p, num_microbatches=m, num_slices=n, costs=costs, options=options)
        simulation = simulate(plan, costs)
        bound = lower_bound(plan.placement, m, costs, max(simulation.peak_memory))
        assert simulation.makespan_ms == pytest.approx(bound.makespan_ms, rel=1e-8)
        assert bound.makespan_ms > 3 * m, "the ends are part of it"


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
    options = SearchOptions(memory_limit=limit, objective=Objective.SPAN, budget=3e7)
    plan = build_plan("zbv", num_ranks=p, num_microbatches=m, costs=costs, options=options)
    assert simulate(plan, costs).span_ms == pytest.approx(lower_bound(placement, m, costs, limit).span_ms, rel=1e-8)
