"""Microbatches of unequal lengths with different numbers of slices: order, files, costs, and plans."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import strategies as st

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.communication import num_messages, place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import CostTable, numbers_of_slices
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.deadlock import stuck_ranks
from megatron.zerobubble.plan.ir import Op, OpKind, Passes, Placement, Plan
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import AUTO, make_plan
from megatron.zerobubble.plan.registry import build_plan, schedule_spec
from megatron.zerobubble.plan.render.plan_summary import plan_svg, slices_text
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.simulate import peak_memory, read_plan, simulate
from megatron.zerobubble.plan.transforms import first_microbatches, forward_only, recut
from megatron.zerobubble.plan.validate import validate

HAND_WRITTEN = ("1f1b", "zb-h1", "zb-h2", "zb", "zbv")
TOKENS = (8192, 1000, 2000, 700, 512, 4096)


def cut_plan(name: str, p: int, counts: Sequence[int]) -> Plan:
    """A hand-written order of microbatches with these numbers of slices."""
    return recut(build_plan(name, num_ranks=p, num_microbatches=len(counts), num_slices=max(counts)), counts)


def of_tokens(placement: Placement, tokens: Sequence[int], n: int, *, kept: float = 0.5, comm_ms: float = 0.1) -> CostModel:
    """F=B=W per rank at the mean length, with attention, and with keys and values."""
    costs = CostModel.uniform(placement, activation_after_backward=kept, comm_ms=comm_ms)
    return lengths_of(tokens).applied(costs, n)


def lengths_of(tokens: Sequence[int]) -> LengthsAndLinks:
    return LengthsAndLinks(tuple(tokens), 0.2, sequence_length=max(tokens), key_share=0.1)


def some_tokens(m: int, seed: int) -> list[int]:
    """Log-normal lengths of about 1,000 tokens."""
    random = Random(seed)
    return [max(16, round(1000 * random.lognormvariate(0, 0.9))) for _ in range(m)]


# -- order --------------------------------------------------------------------------------------------------------------


def test_passes_are_numbered_through_microbatches_of_different_numbers_of_slices() -> None:
    passes = Passes((2, 1, 3))
    assert [str(passes.nth(0, OpKind.F, number)) for number in range(6)] == ["0F0", "0F0.1", "0F1", "0F2", "0F2.1", "0F2.2"]
    assert [str(passes.nth(0, OpKind.B, number)) for number in range(6)] == ["0B0.1", "0B0", "0B1", "0B2.2", "0B2.1", "0B2"]
    for kind, number in itertools.product(OpKind, range(6)):
        assert passes.number(passes.nth(3, kind, number)) == number


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written_orders_are_valid_for_any_numbers_of_slices(name: str) -> None:
    random = Random(1)
    for p, m, n in itertools.product((1, 2, 3, 4), (1, 2, 5, 9), (1, 2, 3, 8)):
        counts = [random.randint(1, n) for _ in range(m)]
        equal = build_plan(name, num_ranks=p, num_microbatches=m, num_slices=n)
        plan = recut(equal, counts)
        validate(plan)
        for own in (equal, plan, forward_only(plan), recut(plan, counts[::-1])):
            assert not stuck_ranks(place_communication(own))
        assert num_messages(plan) == sum(len(step.send) for row in place_communication(plan).steps for step in row)
        assert recut(equal, [n] * m) == equal
        kept = first_microbatches(plan, 1)
        validate(kept)
        assert kept.num_slices == counts[0]


def test_an_order_that_was_made_for_other_slices_has_more_f_ahead() -> None:
    """Slice 0 of microbatch 1 has the number of slice 1 of microbatch 0, whose B needs no F of microbatch 1."""
    rows = [list(map(Op.parse, ["0F0", "0F0.1", "0B0.1", "0W0.1", "0B0", "0W0", "0F1", "0F1.1", "0B1.1", "0W1.1", "0B1", "0W1"]))]
    plan = recut(Plan.of("any", Placement.linear(1), 2, rows, num_slices=2), [1, 2])
    assert list(map(str, plan.ops[0])) == ["0F0", "0F1", "0F1.1", "0B0", "0W0", "0B1.1", "0W1.1", "0B1", "0W1"]
    validate(plan)


@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min", "zb"])
def test_searched_orders_are_valid_for_any_numbers_of_slices(name: str) -> None:
    random = Random(2)
    for p, m, n in ((2, 3, 3), (3, 7, 4), (4, 8, 8)):
        options = SearchOptions(memory_limit=1.0 if name == "zbv" else None, budget=1e4)
        equal = build_plan(name, num_ranks=p, num_microbatches=m, num_slices=n, options=options)
        for _ in range(5):
            plan = recut(equal, [random.choice((1, 1, 2, n)) for _ in range(m)])
            validate(plan)
            assert not stuck_ranks(place_communication(plan))


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("0F0 0F0.1 0B0.1 0B0 0W0.1 0W0 0F1 0F1.1 0B1 0W1", r"0F1.1 has a slice that does not exist .*slices are 0..0"),
        ("0F0 0B0 0W0 0F1 0B1 0W1", "0F0.1 is missing"),
    ],
)
def test_slices_that_a_microbatch_has_not_are_refused(ops: str, message: str) -> None:
    plan = Plan("any", Placement.linear(1), 2, (tuple(map(Op.parse, ops.split())),), num_slices=2, slice_counts=(2, 1))
    with pytest.raises(PlanError, match=message):
        validate(plan)


def test_a_plan_of_unequal_slices_is_a_file_of_version_3() -> None:
    plan = replace(cut_plan("zbv", 2, (1, 3, 2)), assignment=(2, 0, 1))
    body = json.loads(plan.to_json())
    assert body["format"] == "zerobubble-plan/3"
    assert (body["num_slices"], body["slice_counts"]) == (3, [1, 3, 2])
    assert Plan.from_json(plan.to_json()) == plan
    for broken in ([1, 3], [1, 3, 0], [1, 2, 2], [1, 3, "2"], "3", [1, 4, 2]):
        with pytest.raises(PlanError, match="slice"):
            Plan.from_json(json.dumps(body | {"slice_counts": broken}))


def test_a_plan_whose_counts_are_equal_is_the_plan_without_them() -> None:
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=3, num_slices=2)
    again = replace(plan, slice_counts=(2, 2, 2))
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert "slice_counts" not in json.loads(plan.to_json())


# -- costs --------------------------------------------------------------------------------------------------------------


def test_the_longest_has_all_slices_and_the_others_as_many_as_make_about_the_same_work() -> None:
    assert numbers_of_slices([8.0, 4.0, 1.0, 0.2, 0.0], 8) == (8, 4, 1, 1, 1)
    assert numbers_of_slices([0.0, 0.0], 4) == (4, 4)
    costs = of_tokens(Placement.linear(2), TOKENS, 8)
    counts = costs.table.counts
    assert counts == (8, 1, 2, 1, 1, 4)
    each_one = [costs.table.of(i) for i in range(6)]
    assert costs.tokens == TOKENS
    times = [
        [math.fsum(column) for column in zip(*(rows[0] for rows in list(each.lists.values())[:3]), strict=True)]
        for each in each_one
    ]
    assert all(own == pytest.approx([own[0]] * len(own), rel=1e-2) for own in times), "the slices of one, of equal work"
    long = [each[0] for each in times if len(each) > 1]
    assert max(long) < 1.3 * min(long)
    whole = LengthModel.of(
        CostModel.uniform(Placement.linear(2), activation_after_backward=0.5),
        tokens=sum(TOKENS) / 6,
        squares=sum(each * each for each in TOKENS) / 6,
        attention_share=0.2,
    ).costs(TOKENS)
    for name in ("forward_ms", "backward_ms", "wgrad_ms"):
        for i, each in enumerate(each_one):
            assert math.fsum(getattr(each, name)[0]) == pytest.approx(getattr(whole, name)[0][i])
    assert costs.forward_ms == pytest.approx((1.0, 1.0)), "the mean"
    assert costs.comm_ms == pytest.approx(0.1 * 6 / sum(counts))
    assert costs.whole.activation == pytest.approx((1.0, 1.0))
    assert costs.merged(1).table.of(0).forward_ms[0] == pytest.approx(
        [a + b for a, b in zip(*costs.table.of(0).forward_ms, strict=True)]
    )


def test_costs_of_unequal_slices_are_in_the_file() -> None:
    plan = cut_plan("1f1b", 2, (4, 1, 1, 1, 1, 2))
    costs = of_tokens(plan.placement, TOKENS, 4)
    found, read = read_plan(plan.to_json(costs=costs.to_json()))
    assert (found, read) == (plan, costs)
    with pytest.raises(PlanError, match=r"costs are for \[4, 1, 1, 1, 1, 2\] slices .* plan has \[4, 1, 1, 1, 2, 2\]"):
        simulate(cut_plan("1f1b", 2, (4, 1, 1, 1, 2, 2)), costs)
    with pytest.raises(ConfigError, match="leave others out"):
        CostModel.from_json(costs.to_json() | costs.whole.to_json())


def test_costs_of_whole_microbatches_are_cut_evenly() -> None:
    """By the plan's own numbers of slices, which move with the data."""
    plan = replace(cut_plan("zb-h1", 2, (1, 3, 2)), assignment=(2, 0, 1))
    rows = ((3.0, 2.0, 1.0),) * 2
    every = LengthModel.of(CostModel.uniform(plan.placement), tokens=1.0, squares=1.0).costs((3, 2, 1))
    costs = CostModel.of(every)
    own = simulate(plan, costs).costs
    assert own.table.counts == (3, 2, 1)
    assert own.table.of(0).forward_ms[0] == (rows[0][0] / 3,) * 3
    assert costs.divided(3).table == own.table


def test_equal_microbatches_one_by_one_cost_what_they_cost_together() -> None:
    for name in HAND_WRITTEN:
        plan = build_plan(name, num_ranks=3, num_microbatches=4, num_slices=3)
        lengths = LengthsAndLinks(sequence_length=4096, attention_share=0.3, key_share=0.1)
        alike = lengths.applied(CostModel.uniform(plan.placement), 3)
        each = replace(alike, table=CostTable.joined([alike.table] * 4))
        one, other = simulate(plan, alike), simulate(plan, each)
        assert one.rows == other.rows
        assert one.peak_memory == other.peak_memory


def test_it_is_drawn_with_its_numbers_of_slices() -> None:
    simulation = simulate(cut_plan("zbv", 2, (4, 1, 1, 1, 1, 2)), of_tokens(Placement.v(2), TOKENS, 4))
    assert slices_text(simulation.plan) == "1 to 4 slices per microbatch"
    assert "1 to 4 slices per microbatch" in plan_svg(simulation)
    assert all(f"<title>{op} " in plan_svg(simulation) for op in ("0F0.3", "0B0.3", "3W5.1"))


# -- search -------------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[Plan, CostModel, SearchOptions]:
    """A hand-written order, costs of every slice, and options with or without a limit."""
    name, p, m = draw(st.sampled_from(HAND_WRITTEN)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    n = draw(st.integers(2, 5))
    spec = schedule_spec(name, num_ranks=p)
    costs = of_tokens(spec.placement, some_tokens(m, draw(st.integers(0, 10**6))), n, kept=draw(st.sampled_from([0.3, 1.0])))
    if costs.table.is_alike:
        costs = replace(costs, table=CostTable.joined([costs.table] * m))
    times = draw(st.sampled_from([None, None, 1.0, 1.5, 9.0]))
    limit = None if times is None else times * smallest_memory(spec.placement, m, costs)
    plan = cut_plan(name, p, costs.table.counts)
    return plan, costs, SearchOptions(memory_limit=limit, objective=draw(st.sampled_from(list(Objective))), budget=1e4)


@pytest.mark.parametrize("name", [*HAND_WRITTEN, "v-half"])
def test_slices_of_unequal_microbatches_pay(name: str) -> None:
    """Few long ones among short ones: the pipeline fills and drains by slices, at less memory."""
    p, tokens = 4, some_tokens(8, 1)
    budget = 2e5
    whole, cut = (
        make_plan(
            PlanRequest(
                schedule=name,
                num_ranks=p,
                num_microbatches=8,
                stages=partial(CostModel.uniform, activation_after_backward=0.5),
                lengths=lengths_of(tokens),
                options=SearchOptions(objective=Objective.MAKESPAN, budget=budget),
                num_slices=(n,),
            )
        )
        for n in (1, 4)
    )
    assert cut.num_slices == 4
    assert cut.simulation.plan.slice_counts
    assert max(cut.simulation.peak_memory) < max(whole.simulation.peak_memory)
    assert cut.simulation.makespan_ms < whole.simulation.makespan_ms * (1.05 if name.startswith("v-") else 1.0)


def test_a_limit_leaves_space_for_the_slices_that_run_ahead() -> None:
    """Of an order of equal slices that fits it others may not, and then as many fewer microbatches are in flight."""
    spec, tokens = schedule_spec("zbv", num_ranks=4, num_slices=8), some_tokens(12, 3)
    costs = of_tokens(spec.placement, tokens, 8)
    free = MicrobatchPlanner(spec, 12, options=SearchOptions(budget=1e5)).plan(costs)
    limit = 0.9 * max(peak_memory(free, costs))
    options = SearchOptions(memory_limit=limit, budget=1e6)
    plan = MicrobatchPlanner(spec, 12, costs=costs, options=options).plan(costs)
    validate(plan, memory_limit=limit, costs=costs)
    assert simulate(plan, costs).makespan_ms < 1.3 * simulate(free, costs).makespan_ms


def test_the_planner_chooses_the_number_of_slices_of_the_longest() -> None:
    tokens = some_tokens(8, 4)
    found = make_plan(
        PlanRequest(
            schedule=AUTO,
            num_ranks=4,
            num_microbatches=8,
            stages=partial(CostModel.uniform, activation_after_backward=0.5, comm_ms=0.1),
            lengths=lengths_of(tokens),
            options=SearchOptions(memory_limit=1.0, budget=1e5),
            num_slices=(2, 8),
        )
    )
    assert found.num_slices in (2, 8)
    assert found.bound.makespan_ms <= found.simulation.makespan_ms
    assert max(found.simulation.peak_memory) <= 1.0 + 1e-9


def test_a_limit_that_only_one_microbatch_after_the_other_fits_is_kept() -> None:
    spec = schedule_spec("zb", num_ranks=3, num_slices=4)
    costs = of_tokens(spec.placement, TOKENS, 4)
    limit = smallest_memory(spec.placement, 6, costs)
    options = SearchOptions(memory_limit=limit, budget=2e5)
    plan = MicrobatchPlanner(spec, 6, costs=costs, options=options).plan(costs)
    assert max(peak_memory(plan, costs)) <= limit + 1e-9
    with pytest.raises(ConfigError, match="microbatch 0 has 8192 tokens and the limit holds at most "):
        MicrobatchPlanner(spec, 6, costs=costs, options=replace(options, memory_limit=limit / 2)).plan(costs)
