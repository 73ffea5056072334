"""Assigning unequal microbatches to the slots of a plan: never slower, within the memory, the same for a seed."""

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.communication import place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostTable
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.deadlock import stuck_ranks
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules, schedule_info, schedule_spec
from megatron.zerobubble.plan.search.assign import ITERATION_BUDGET, assign
from megatron.zerobubble.plan.search.core import Core
from megatron.zerobubble.plan.search.interface import Problem
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.transforms import recut
from megatron.zerobubble.plan.validate import validate
from tests.plan.test_unequal_slices import problems as sliced_problems
from tests.support.plans import plan_of_text

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "plans for unequal microbatches and links: any lengths, links, schedules and memory limits, never slower than the data as"
    " it comes or sorted, equal lengths to the op",
    "works, simulated",
    also=("plan/costs/test_unequal_costs.py", "tools/test_benchmarks.py"),
)

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb", "zbv", "v-half")
BUDGET = 2e5


def of_lengths(placement: Placement, tokens: Sequence[int], *, comm_ms: float = 0.1, kept: float = 0.5) -> CostModel:
    """F=B=W per rank at the mean length."""
    mean = sum(tokens) / len(tokens)
    uniform = CostModel.uniform(placement, activation_after_backward=kept)
    costs = LengthModel.of(uniform, tokens=mean, squares=mean * mean, attention_share=0.1).costs(tokens)
    return CostModel.of(costs, comm_ms=comm_ms)


def some_lengths(m: int, seed: int, spread: float = 0.55) -> list[int]:
    """Log-normal lengths of about 1,000 tokens."""
    random = Random(seed)
    return [max(1, round(1000 * random.lognormvariate(0, spread))) for _ in range(m)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Plan, CostModel, SearchOptions]:
    """A plan of any schedule, costs per stage and microbatch, often links, and options with or without a limit."""
    name, p, m = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 4)), draw(st.integers(2, 8))
    plan = build_plan(name, num_ranks=p, num_microbatches=m)
    random = Random(draw(st.integers(0, 10**6)))
    rows = {n: tuple(tuple(random.uniform(0.01, 5) for _ in range(m)) for _ in range(plan.num_stages)) for n in COST_LISTS}
    links = None
    if draw(st.booleans()):
        links = Links(latency_ms=tuple(tuple(random.uniform(0, 2) for _ in range(p)) for _ in range(p)))
    costs = CostModel.of(CostTable.of_microbatches(rows), comm_ms=0.2, links=links)
    times = draw(st.sampled_from([None, 1.0, 1.3, 2.0, 9.0]))
    limit = None if times is None else times * smallest_memory(plan.placement, m, costs)
    objective = draw(st.sampled_from(list(Objective)))
    return plan, costs, SearchOptions(memory_limit=limit, objective=objective, budget=draw(st.sampled_from([0.0, BUDGET])))


def in_order(plan: Plan, costs: CostModel) -> list[Plan]:
    """The plan with the data as it comes, and sorted by length both ways."""
    m, counts = plan.num_microbatches, plan.passes.slices
    tables = [costs.table.of(i) for i in range(m)]
    work = [sum(sum(row) for rows in list(each.lists.values())[:3] for row in rows) for each in tables]
    ascending = sorted(range(m), key=work.__getitem__)
    sorted_both_ways = (ascending, ascending[::-1])
    return [plan, *(replace(recut(plan, [counts[i] for i in own]), assignment=tuple(own)) for own in sorted_both_ways)]


@given(problems() | sliced_problems())
def test_never_slower_than_as_it_comes_nor_sorted_and_within_the_memory(problem: tuple[Plan, CostModel, SearchOptions]) -> None:
    plan, costs, options = problem
    fixed = not schedule_info(plan.schedule).is_searched
    limit = options.memory_limit
    if fixed and limit is not None and all(max(peak_memory(other, costs.reserved)) > limit for other in in_order(plan, costs)):
        return  # the order itself may need more
    found = assign(plan, costs, options, fixed_order=fixed)
    validate(found, memory_limit=limit, costs=costs)
    assert not stuck_ranks(place_communication(found, costs=costs))
    reached = options.objective.of(simulate(found, costs))
    assert options.objective.of(lower_bound(found.placement, found.num_microbatches, costs, limit)) <= reached * (1 + 1e-6)
    for other in in_order(plan, costs):
        if limit is None or max(peak_memory(other, costs)) <= limit:
            assert reached <= options.objective.of(simulate(other, costs)) * (1 + 1e-9)
    if limit is None:
        most = max(max(peak_memory(other, costs.reserved)) for other in in_order(plan, costs))
        assert max(peak_memory(found, costs)) <= most + 1e-9
    if fixed:
        for before, after in zip(plan.ops, found.ops, strict=True) if not plan.slice_counts else ():
            assert [op for op in after if op.kind is not OpKind.W] == [op for op in before if op.kind is not OpKind.W]


@pytest.mark.parametrize("info", known_schedules(), ids=lambda info: info.name)
def test_equal_lengths_give_todays_plan_to_the_op(info: object) -> None:
    name = str(getattr(info, "name", info))
    spec = schedule_spec(name, num_ranks=3)
    plain = CostModel.uniform(spec.placement, forward_ms=1.1, wgrad_ms=0.7, comm_ms=0.1, activation_after_backward=0.4)
    model = LengthModel.of(plain, tokens=128, squares=128.0**2, attention_share=0.0)
    options = SearchOptions(budget=BUDGET)
    today = build_plan(name, num_ranks=3, num_microbatches=7)
    equal = CostModel.of(model.costs([128] * 7), comm_ms=0.1)
    assert MicrobatchPlanner(spec, 7, options=options).plan(equal) == today
    searched = make_plan(PlanRequest(schedule=name, num_ranks=3, num_microbatches=7, stages=lambda _: equal, options=options))
    assert equal.is_plain
    assert (
        searched.simulation.plan
        == make_plan(
            PlanRequest(schedule=name, num_ranks=3, num_microbatches=7, stages=lambda _: equal.plain, options=options)
        ).simulation.plan
    )


def test_long_microbatches_are_put_side_by_side() -> None:
    """Twelve long and twelve short microbatches in turn: grouped, hardly anything is left to wait for."""
    plan = build_plan("zbv", num_ranks=8, num_microbatches=24)
    costs = of_lengths(plan.placement, [500, 1500] * 12, comm_ms=0.0)
    found = assign(plan, costs, SearchOptions(objective=Objective.MAKESPAN, budget=1e6))
    before, after = simulate(plan, costs), simulate(found, costs)
    assert before.idle_share > 0.15
    assert after.idle_share < (0.08)
    assert sorted(found.assignment) == list(range(24))


@pytest.mark.parametrize("name", ["zb", "zbv", "v-half", "zb-interleaved"])
@pytest.mark.parametrize("times", [1.0, 1.5, 3.0])
def test_a_tight_limit_in_tokens_is_kept(name: str, times: float) -> None:
    """At 1.0 the longest microbatch fits alone; its neighbors have to wait."""
    spec = schedule_spec(name, num_ranks=3)
    costs = of_lengths(spec.placement, some_lengths(9, 1, 1.0))
    limit = times * smallest_memory(spec.placement, 9, costs)
    options = SearchOptions(memory_limit=limit, budget=BUDGET)
    try:
        planner = MicrobatchPlanner(spec, 9, costs=costs, options=options)
    except ConfigError as error:
        raise AssertionError(f"a microbatch of the mean size is smaller than the longest: {error}") from None
    plan = planner.plan(costs)
    assert max(peak_memory(plan, costs)) <= limit + 1e-9
    validate(plan, memory_limit=limit, costs=costs)


def test_a_microbatch_that_no_plan_can_hold_is_refused_with_its_tokens() -> None:
    spec = schedule_spec("zbv", num_ranks=4)
    tokens = [1000, 1000, 8000, 1000, 1000, 1000, 1000, 1000]
    costs = of_lengths(spec.placement, tokens)
    # A rank holds 4 * 0.5 microbatches of the mean size, 1875 tokens: 3750 tokens.
    planner = MicrobatchPlanner(spec, 8, options=SearchOptions(memory_limit=0.5))
    with pytest.raises(
        ConfigError, match=r"microbatch 2 has 8000 tokens and the limit holds at most 3750: .* works is 1\.0666"
    ) as caught:
        planner.plan(costs)
    assert "\n" not in str(caught.value)


def test_a_fixed_order_that_fits_with_no_assignment_is_refused() -> None:
    plan = build_plan("1f1b", num_ranks=3, num_microbatches=6)
    costs = of_lengths(plan.placement, [1000, 1100, 1200, 1000, 1100, 1200])
    with pytest.raises(PlanError, match=r"no assignment of these 6 microbatches .* memory limit 0\.5; .* sorted 1\.0"):
        assign(plan, costs, SearchOptions(memory_limit=0.5, budget=BUDGET), fixed_order=True)


def test_plans_with_fused_and_split_backwards_are_refused() -> None:
    plan = plan_of_text("0F0 0BW0 0F1 0B1 0W1", schedule="mixed", placement=Placement.linear(1), num_microbatches=2)
    with pytest.raises(PlanError, match="fused and split"):
        assign(plan, of_lengths(plan.placement, [1, 2]), SearchOptions(budget=0))


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "zb", "interleaved-1f1b"])
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_plan_that_knows_a_slow_link_is_never_worse(name: str, slow: int) -> None:
    spec = schedule_spec(name, num_ranks=4)
    latency = tuple(tuple(2.0 if {a, b} == {slow, slow + 1} else 0.2 for b in range(4)) for a in range(4))
    plain = CostModel.uniform(spec.placement, comm_ms=0.2, activation_after_backward=0.5)
    knows = replace(plain, links=Links(latency_ms=latency))
    for objective in Objective:
        options = SearchOptions(objective=objective, memory_limit=2.0, budget=BUDGET)
        ignorant = make_plan(
            PlanRequest(schedule=name, num_ranks=4, num_microbatches=10, stages=lambda _: plain, options=options)
        ).simulation.plan
        informed = MicrobatchPlanner(spec, 10, costs=plain, options=options, base_options=options).plan(knows)
        assert objective.of(simulate(informed, knows)) <= objective.of(simulate(ignorant, knows)) * (1 + 1e-9)


def test_the_same_seed_and_budget_give_the_same_plan() -> None:
    spec = schedule_spec("zbv", num_ranks=3)
    planner = MicrobatchPlanner(spec, 9, options=SearchOptions(budget=BUDGET))
    costs = of_lengths(spec.placement, some_lengths(9, 2))
    assert planner.plan(costs) == planner.plan(costs)
    assert planner.base == build_plan("zbv", num_ranks=3, num_microbatches=9)


def test_an_iteration_is_planned_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Op evaluations, which no other process slows down; 1e6 of them take about 20 ms."""
    cores: list[Any] = []

    class Counted(Core):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            cores.append(self)

    spec = schedule_spec("zbv", num_ranks=8)
    planner = MicrobatchPlanner(spec, 24, options=SearchOptions(budget=BUDGET, objective=Objective.MAKESPAN))
    planner.plan(of_lengths(spec.placement, some_lengths(24, 0)))  # once also the plan for equal ones
    monkeypatch.setattr("megatron.zerobubble.plan.search.assign.Core", Counted)
    for seed in range(1, 4):
        cores.clear()
        planner.plan(of_lengths(spec.placement, some_lengths(24, seed)))
        assert 0.5 * BUDGET < sum(core.work for core in cores) < 1.5 * BUDGET
    assert ITERATION_BUDGET <= 1e6


def test_auto_plans_for_unequal_microbatches() -> None:
    options = SearchOptions(memory_limit=2.0, budget=10 * BUDGET)
    tokens = some_lengths(8, 4)
    result = make_plan(
        PlanRequest(
            schedule="auto",
            num_ranks=2,
            num_microbatches=8,
            stages=lambda placement: of_lengths(placement, tokens),
            options=options,
        )
    )
    assert max(result.simulation.peak_memory) <= 2.0 + 1e-9
    assert result.bound.span_ms <= result.simulation.span_ms * (1 + 1e-9)
    assert result.runner_up is None or result.runner_up.simulation.span_ms >= result.simulation.span_ms


def test_other_threads_run_while_the_core_searches() -> None:
    """A planner thread works one iteration ahead of the thread that launches kernels, and must not stop it.

    With so long a switch interval a thread gives up the interpreter only where it says so.
    """
    core = Core(Problem(2, [0, 1], [1.0] * 6, 0.1, [1.0] * 2, [1.0] * 2, 9.0, True))
    rows = [bytes([0, 0, 1, 1])] * 2
    steps, seen = [0], list[int]()

    def search() -> None:
        before = steps[0]
        core.assign(rows, [0.5] * 2, [0, 1], 0, 1e7, 0.0, False)
        seen.append(steps[0] - before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        thread = threading.Thread(target=search)
        thread.start()
        while thread.is_alive():
            steps[0] += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert seen[0] > 0
