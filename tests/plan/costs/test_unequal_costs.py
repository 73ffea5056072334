"""The cost model, costs per microbatch and a matrix of links: also in the simulator, the validator and the plan file."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostTable
from megatron.zerobubble.plan.costs.length_model import LengthModel, Work
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.links import Links, LinkTime, unequal_links
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import memory_over_time, peak_memory, simulate
from megatron.zerobubble.plan.transforms import first_microbatches
from megatron.zerobubble.plan.validate import validate
from tests.support.plans import text_of

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "v-half")


def of_lengths(placement: Placement, tokens: tuple[int, ...], *, attention_share: float = 0.0) -> CostModel:
    """F=B=W per rank at 100 tokens."""
    model = LengthModel.of(CostModel.uniform(placement), tokens=100, squares=1e4, attention_share=attention_share)
    return CostModel.of(model.costs(tokens))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, CostModel]:
    """A plan of any schedule with any assignment, costs per microbatch and a matrix of links."""
    name, p, m = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 4)), draw(st.integers(1, 7))
    plan = build_plan(name, num_ranks=p, num_microbatches=m)
    plan = Plan(plan.schedule, plan.placement, m, plan.ops, tuple(draw(st.permutations(range(m)))))
    values = st.floats(0.01, 10)
    rows = {n: [[draw(values) for _ in range(m)] for _ in range(plan.num_stages)] for n in COST_LISTS}
    links = Links(
        latency_ms=tuple(tuple(draw(st.floats(0, 3)) for _ in range(p)) for _ in range(p)),
        gigabytes_per_s=tuple(tuple(draw(st.floats(1, 100)) for _ in range(p)) for _ in range(p)),
        message_bytes=tuple(draw(st.floats(0, 1e8)) for _ in range(m)),
    )
    return plan, CostModel.of(CostTable.of_microbatches({n: tuple(map(tuple, r)) for n, r in rows.items()}), links=links)


def test_lengths_give_costs_by_their_model() -> None:
    model = LengthModel(
        forward_ms=(Work(1.0, 0.01, 1e-4),),
        backward_ms=(Work(2.0, 0.02, 2e-4),),
        wgrad_ms=(Work(0.0, 0.01, 0.0),),
        activation=(Work(0.0, 0.01, 0.0),),
        activation_after_backward=(Work(0.0, 0.005, 0.0),),
    )
    costs = model.costs([100, 300], squares=[1e4, 5e4])
    assert costs.forward_ms == ((pytest.approx(3.0), pytest.approx(9.0)),)
    assert costs.backward_ms == ((pytest.approx(6.0), pytest.approx(18.0)),)
    assert costs.wgrad_ms == ((1.0, 3.0),)
    assert costs.activation == ((1.0, 3.0),)
    assert model.costs([300]).forward_ms == ((pytest.approx(13.0),),), "one sequence of 300 tokens has 90,000 squares"
    fitted = LengthModel(**{name: (Work(-1.0, 0.001, 0.0),) for name in COST_LISTS}).costs([10])
    assert fitted.forward_ms == ((0.0,),), "a fit that goes below 0 for a short microbatch is 0"


@pytest.mark.parametrize("terms", [Work(3.0, 0.02, 1e-6), Work(0.0, 0.02, 1e-6), Work(0.0, 0.01, 0.0), Work(2.0, 0.0, 0.0)])
def test_a_fit_finds_the_terms_that_made_the_costs(terms: Work) -> None:
    lengths = [(tokens, 0.3 * tokens * tokens) for tokens in (100.0, 700.0, 1500.0, 4000.0, 9000.0)]
    found = Work.fit(lengths, [terms.at(*pair) for pair in lengths])
    assert found == pytest.approx(terms, rel=1e-6, abs=1e-9)


def test_a_fit_has_no_negative_terms_and_extrapolates_one_length_in_proportion() -> None:
    assert Work.fit([(100.0, 1e4), (200.0, 4e4)], [1.0, 1.5])[1:] == (pytest.approx(0.005), 0.0)
    falling = Work.fit([(100.0, 1e4), (200.0, 4e4), (300.0, 9e4)], [3.0, 2.0, 1.0])
    assert min(falling) >= 0
    assert Work.fit([(100.0, 1e4)] * 3, [2.0, 2.2, 1.8]) == (0.0, pytest.approx(0.02), 0.0)
    assert Work.fit([(100.0, 1e4)], [0.0]) == Work()
    measured = of_lengths(Placement.linear(2), (100, 250, 900), attention_share=0.2).table
    assert measured is not None
    again = LengthModel.fit(measured).costs(measured.tokens)
    for name in COST_LISTS:
        for before, after in zip(getattr(measured, name), getattr(again, name), strict=True):
            assert after == pytest.approx(before, rel=1e-6)
    with pytest.raises(ConfigError, match="got 1 lengths and 0 values"):
        Work.fit([(1.0, 1.0)], [])
    with pytest.raises(ConfigError, match="no microbatch has tokens"):
        LengthModel.fit(CostTable.of_microbatches(dict.fromkeys(COST_LISTS, ((1.0, 2.0),))))


def test_attention_doubles_in_backward_and_is_absent_in_wgrad() -> None:
    """At twice the length, F of 3/4 linear and 1/4 attention takes 2.5 times as long; B, 3/5 and 2/5, 2.8; W 2."""
    costs = of_lengths(Placement.linear(1), (100, 200), attention_share=0.25).table
    assert costs is not None
    assert costs.forward_ms[0] == (pytest.approx(1.0), pytest.approx(2.5))
    assert costs.backward_ms[0] == (pytest.approx(1.0), pytest.approx(2.8))
    assert costs.wgrad_ms[0] == (pytest.approx(1.0), pytest.approx(2.0))
    assert costs.activation[0] == (pytest.approx(1.0), pytest.approx(2.0))


def test_equal_microbatches_and_links_are_the_plain_costs() -> None:
    placement = Placement.v(2)
    plain = CostModel.uniform(
        placement, forward_ms=0.1, backward_ms=0.3, wgrad_ms=0.7, comm_ms=0.2, activation_after_backward=0.3
    )
    lists = {name: tuple((value,) * 7 for value in getattr(plain, name)) for name in COST_LISTS}
    links = Links(latency_ms=((0, 0.2), (0.2, 9)))
    assert CostModel.of(CostTable.of_microbatches(lists), links=links) == plain


@given(st.floats(0.1, 100), st.integers(1, 10**6), st.floats(0, 1))
def test_equal_lengths_are_the_plain_costs_to_the_bit(time_ms: float, tokens: int, share: float) -> None:
    """A last digit could change which of two orders a search takes for the better one."""
    costs = CostModel.uniform(Placement.v(2), forward_ms=time_ms, backward_ms=1.1 * time_ms, activation_after_backward=0.37)
    assert LengthsAndLinks((tokens,) * 6, share).applied(costs) == costs


def test_lengths_keep_what_else_costs_say() -> None:
    """Such as those of a run's report."""
    linear = Placement.linear(2)
    step = StepCosts.uniform(linear, reduce_ms=3.0, optimizer_ms=1.0)
    costs = replace(CostModel.uniform(linear, comm_ms=1.0), latency_share=0.5, step=step, all_to_all=(0.2, 0.1))
    for lengths, num_slices in ((LengthsAndLinks(), 1), (LengthsAndLinks((3, 4)), 1), (LengthsAndLinks(sequence_length=64), 2)):
        found = lengths.applied(costs, num_slices)
        assert (found.step, found.all_to_all) == (step, (0.2, 0.1))
        assert found.comm_ms * found.latency_share == pytest.approx(0.5)


def test_means_stand_for_unequal_microbatches() -> None:
    costs = of_lengths(Placement.linear(2), (100, 300))
    assert costs.forward_ms == (2.0, 2.0)
    assert costs.num_microbatches == 2
    assert not costs.is_plain
    assert costs.plain.is_plain
    assert costs.plain.forward_ms == (2.0, 2.0)
    assert costs.merged(1).duration_ms(0, OpKind.BW, 1) == pytest.approx(12.0)


def test_two_microbatches_by_hand() -> None:
    """Tokens 100 and 200, F=B=W=1 per 100 tokens; a message takes 0.25 ms down and 0.5 ms back, and 1 ms more per 10^6 bytes."""
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=2)
    links = Links(latency_ms=((0, 0.25), (0.5, 0)), gigabytes_per_s=((1, 1), (1, 1)), message_bytes=(1e6, 2e6))
    costs = CostModel.of(
        LengthModel.of(CostModel.uniform(plan.placement), tokens=100, squares=1e4).costs([100, 200]), links=links
    )
    assert text_of(plan) == "0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1B0 1F1 1B1 1W0 1W1"
    simulation = simulate(plan, costs)
    assert [(start, end) for _, start, end in simulation.rows[0]] == [
        (0, 1),
        (1, 3),
        (5.75, 6.75),  # 1B0 ends at 4.25, and its message takes 0.5 + 1 ms
        (6.75, 7.75),
        (11.75, 13.75),  # 1B1 ends at 9.25, and its message takes 0.5 + 2 ms
        (13.75, 15.75),
    ]
    assert [(start, end) for _, start, end in simulation.rows[1]] == [
        (2.25, 3.25),
        (3.25, 4.25),
        (5.25, 7.25),  # 0F1 ends at 3, and its message takes 0.25 + 2 ms
        (7.25, 9.25),
        (9.25, 10.25),
        (10.25, 12.25),
    ]
    assert simulation.peak_memory == (1.5, 1.5)
    assert simulation.idle_share == pytest.approx(1 - 9 / 15.75)
    swapped = simulate(Plan(plan.schedule, plan.placement, 2, plan.ops, (1, 0)), costs)
    assert [(start, end) for _, start, end in swapped.rows[0]][:2] == [(0, 2), (2, 3)]
    assert next((start, end) for _, start, end in swapped.rows[1]) == (4.25, 6.25)


@given(cases())
def test_the_validator_and_the_curve_of_memory_have_the_peaks_of_the_simulator(case: tuple[Plan, CostModel]) -> None:
    plan, costs = case
    peaks = peak_memory(plan, costs)
    assert simulate(plan, costs).peak_memory == peaks
    validate(plan, memory_limit=max(peaks), costs=costs)
    with pytest.raises(PlanError, match="memory peaks at"):
        validate(plan, memory_limit=max(peaks) * 0.99, costs=costs)
    stairs = memory_over_time(simulate(plan, costs).rows, plan.num_microbatches, costs.reordered(plan.assignment))
    assert [max(held for _, held in stair) for stair in stairs] == pytest.approx(list(peaks))
    assert [stair[-1][1] for stair in stairs] == pytest.approx([0] * plan.num_ranks, abs=1e-9)


@given(cases())
def test_bubble_rate_and_idle_share_follow_from_the_times_of_the_ops(case: tuple[Plan, CostModel]) -> None:
    plan, costs = case
    simulation = simulate(plan, costs)
    busy = [sum(end - start for _, start, end in row) for row in simulation.rows]
    assert simulation.bubble_rate == pytest.approx(1 - max(busy) / simulation.span_ms, abs=1e-9)
    assert simulation.idle_share == pytest.approx(1 - sum(busy) / (len(busy) * simulation.makespan_ms), abs=1e-9)


@given(cases())
def test_no_plan_beats_the_lower_bound(case: tuple[Plan, CostModel]) -> None:
    """Also under its own peak, with fused backwards and with recomputation, where more memory stays for W than before B."""
    plan, costs = case
    simulation = simulate(plan, costs)
    for limit in (None, max(simulation.peak_memory)):
        bound = lower_bound(plan.placement, plan.num_microbatches, costs, limit)
        assert bound.span_ms <= simulation.span_ms * (1 + 1e-9)
        assert bound.makespan_ms <= simulation.makespan_ms * (1 + 1e-9)


@given(cases())
def test_a_plan_file_keeps_assignment_and_costs(case: tuple[Plan, CostModel]) -> None:
    plan, costs = case
    text = plan.to_json(costs=costs.to_json())
    assert json.loads(text)["format"] == "zerobubble-plan/2"
    assert Plan.from_json(text) == plan
    assert CostModel.from_json(json.loads(text)["costs"]) == costs


@pytest.mark.parametrize("assignment", [[0, 0, 1, 2], [0, 1, 2], [0, 1, 2, 4], ["0", 1, 2, 3], 3])
def test_an_assignment_that_drops_or_repeats_a_microbatch_is_refused(assignment: object) -> None:
    body = json.loads(build_plan("zbv", num_ranks=2, num_microbatches=4).to_json())
    with pytest.raises(PlanError, match="assign"):
        Plan.from_json(json.dumps(body | {"format": "zerobubble-plan/2", "assignment": assignment}))


@given(st.lists(st.lists(st.floats(0, 1e12), min_size=15, max_size=15), min_size=1, max_size=3))
def test_costs_by_length_survive_json_to_the_bit(stages: list[list[float]]) -> None:
    lists = {n: tuple(Work(*row[3 * i : 3 * i + 3]) for row in stages) for i, n in enumerate(COST_LISTS)}
    model = LengthModel(**lists)
    assert LengthModel.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert model.num_stages == len(stages)


def test_auto_limits_measured_costs_to_1f1b_memory_for_these_lengths() -> None:
    """Memory has a constant part, so the two longest count less than their tokens."""
    equal = (Work(1.0, 0.0, 0.0),) * 4
    lists = dict.fromkeys(COST_LISTS, equal) | {"activation": (Work(0.125, 0.375 / 1000, 0.0),) * 4}
    given = LengthsAndLinks((100, 4000, 2000), model=LengthModel(**lists))
    assert given.auto_memory_limit(2) == pytest.approx((4 * 0.125 + 2 * 0.375 * 6) / 2)
    assert LengthsAndLinks((1000,) * 3, model=given.model).auto_memory_limit(2) == pytest.approx(1.0), "the usual length"


def length_model_json(name: str, value: object) -> object:
    """Costs by length of two stages with another value for one list, or for the term `list.term` of stage 1."""
    body = LengthModel(**dict.fromkeys(COST_LISTS, (Work(1.0, 0.5, 0.25),) * 2)).to_json()
    name, _, term = name.partition(".")
    if term:
        body[name][1][term] = value
    else:
        body[name] = value
    return body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([1], r"must be an object with forward_ms, .*, got \[1\]"),
        ({}, "'forward_ms' must be a list with one object per stage, got None"),
        (length_model_json("wgrad_ms", []), "'wgrad_ms' must be a list with one object per stage, got \\[\\]"),
        (length_model_json("wgrad_ms", [[1.0, 0.5, 0.25]] * 2), "wgrad_ms by length, stage 0, must be an object with constant"),
        (length_model_json("activation", [Work()._asdict()]), "forward_ms has 2 stages and activation has 1"),
        (length_model_json("forward_ms.per_square", math.nan), "per_square of forward_ms by length, stage 1, is nan; it must be"),
        (length_model_json("backward_ms.constant", -1.0), "constant of backward_ms by length, stage 1, is -1.0"),
        (length_model_json("backward_ms.per_token", math.inf), "per_token of backward_ms by length, stage 1, is inf"),
        (length_model_json("activation.per_token", None), "per_token of activation by length, stage 1, is None"),
        (length_model_json("activation.per_token", True), "per_token of activation by length, stage 1, is True"),
        (length_model_json("activation.per_token", "1" * 999), "per_token of activation by length, stage 1, is '111"),
        (length_model_json("activation_after_backward", [{}] * 2), "constant of activation_after_backward by length, stage 0"),
    ],
)
def test_malformed_costs_by_length_are_refused_in_one_line(body: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LengthModel.from_json(body)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_assigned_plan_is_not_cut() -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=4)
    assigned = Plan(plan.schedule, plan.placement, 4, plan.ops, (3, 2, 1, 0))
    with pytest.raises(PlanError, match="assigns all microbatches"):
        first_microbatches(assigned, 2)


def uniform_json(**changes: object) -> dict[str, object]:
    return CostModel.uniform(Placement.linear(2)).to_json() | changes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Links(latency_ms=((0, 1), (1,))), "2 rows of 1, 2 numbers"),
        (lambda: Links(latency_ms=((0, 1), (-1, 0))), "from rank 1 to rank 0 is -1"),
        (lambda: Links(latency_ms=((0, math.inf), (1, 0))), "from rank 0 to rank 1 is inf"),
        (lambda: Links(latency_ms=((0, 1), (1, 0)), gigabytes_per_s=((0, 0), (1, 0))), "give a bandwidth above 0"),
        (lambda: Links(latency_ms=((0, 1), (1, 0)), gigabytes_per_s=((1,),)), "gigabytes_per_s has 1 rows"),
        (
            lambda: Links(latency_ms=((0, 1e12), (1, 0)), gigabytes_per_s=((0, 1), (1, 0)), message_bytes=(1e6,)),
            "the time in ms of the largest message from rank 0 to rank 1 is 1000000000001.0",
        ),
        (lambda: Links(latency_ms=()), "at least one rank"),
        (lambda: Links(latency_ms=((0,),), message_bytes=(-1,)), "message_bytes of microbatch 0 is -1"),
        (lambda: of_lengths(Placement.linear(2), (100, 0)), "microbatch 1 has 0 tokens"),
        (lambda: of_lengths(Placement.linear(2), ()), "no microbatch has tokens"),
        (lambda: of_lengths(Placement.linear(2), (1, 2), attention_share=1.5), "attention share is 1.5"),
        (lambda: CostTable.of_microbatches(dict.fromkeys(COST_LISTS, ((1.0, 2.0), (1.0,)))), "has 1 microbatches"),
        (lambda: CostTable.of_microbatches(dict.fromkeys(COST_LISTS, ((1.0, -2.0),))), "stage 0, microbatch 1 is -2.0"),
        (lambda: Links.from_json([1]), "an object with latency_ms"),
        (lambda: CostModel.uniform(Placement.linear(2), forward_ms=10**400), r"forward_ms is 1.*finite number from 0 to 1e\+12"),
        (lambda: CostModel.uniform(Placement.linear(2), forward_ms=1.01e12), r"forward_ms is 1.*finite number from 0 to 1e\+12"),
        (lambda: CostModel.from_json(uniform_json(wgrad_ms=[1.0, math.nan])), "wgrad_ms of stage 1"),
        (lambda: CostModel.from_json(uniform_json(backward_ms=[1.0])), "forward_ms has 2 stages and backward_ms has 1"),
        (lambda: CostModel.from_json(uniform_json(**{name: [] for name in COST_LISTS})), "at least one stage"),
        (lambda: CostModel.from_json([]), "costs"),
        (lambda: CostModel.from_json({"forward_ms": 1.0}), "costs"),
        (lambda: CostTable.from_json({"microbatches": {}}), "'forward_ms' of 'microbatches'"),
        (lambda: CostTable.from_json({"microbatches": {name: [[]] for name in COST_LISTS}}), "at least one microbatch"),
        (lambda: CostTable.from_json({"slices": {name: [[], []] for name in COST_LISTS}}), "at least one microbatch"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises((ConfigError, PlanError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_costs_of_another_size_are_refused() -> None:
    plan = build_plan("1f1b", num_ranks=2, num_microbatches=3)
    with pytest.raises(PlanError, match="for 2 microbatches and the plan has 3"):
        simulate(plan, of_lengths(plan.placement, (1, 2)))
    with pytest.raises(PlanError, match="for 3 stages and the plan has 2"):
        simulate(plan, CostModel.uniform(Placement.linear(3)))
    links = Links(latency_ms=((0, 1, 2), (1, 0, 1), (2, 1, 0)))
    costs = CostModel.of(LengthModel.of(CostModel.uniform(plan.placement), tokens=1, squares=1).costs((1, 2, 3)), links=links)
    with pytest.raises(PlanError, match="matrix of links has 3 rows and the plan 2 ranks"):
        simulate(plan, costs)


@pytest.mark.parametrize("value", [None, "x", -1.0, math.nan])
def test_a_diagonal_is_ignored_and_written_as_0(value: object) -> None:
    body = {"latency_ms": [[value, 1.0], [2.0, value]], "gigabytes_per_s": [[value, 3.0], [4.0, value]]}
    links = Links.from_json(body)
    assert links.to_json()["latency_ms"] == [[0, 1.0], [2.0, 0]]
    assert links.to_json()["gigabytes_per_s"] == [[0, 3.0], [4.0, 0]]
    plan = build_plan("zbv", num_ranks=2, num_microbatches=3)
    assert simulate(plan, replace(of_lengths(plan.placement, (100, 200, 300)), links=links)).span_ms < math.inf


def test_measured_links_are_a_matrix_where_they_differ() -> None:
    assert unequal_links({}, 2, shortest_pass_ms=1.0) is None
    alike = {(0, 1): LinkTime(0.1, 0.09), (1, 0): LinkTime(0.19, 0.09)}
    assert unequal_links(alike, 2, shortest_pass_ms=1.0) is None, "measurements of one link differ as much"
    queued = unequal_links(alike, 2, shortest_pass_ms=0.2)
    assert queued is not None
    assert (queued.time_ms(1, 0), queued.busy_ms(1, 0)) == pytest.approx((0.19, 0.09))
    assert Links.from_json(queued.to_json()) == queued
    measured = {(0, 1): LinkTime(0.1), (1, 0): LinkTime(0.1), (1, 2): LinkTime(1.0), (2, 1): LinkTime(1.2)}
    links = unequal_links(measured, 3, shortest_pass_ms=1.0)
    assert links is not None
    assert (links.time_ms(0, 1), links.time_ms(2, 1)) == (0.1, 1.2)
    assert links.time_ms(0, 2) == pytest.approx(0.6), "no message takes it"


def test_uniform_gives_each_chunk_its_part_of_a_rank() -> None:
    costs = CostModel.uniform(Placement.v(2), forward_ms=4, backward_ms=6, wgrad_ms=2, comm_ms=0.5, activation_after_backward=0.4)
    assert costs.forward_ms == (2, 2, 2, 2)
    assert costs.backward_ms == (3, 3, 3, 3)
    assert costs.wgrad_ms == (1, 1, 1, 1)
    assert costs.comm_ms == 0.5
    assert costs.activation == (0.5, 0.5, 0.5, 0.5)
    assert costs.activation_after_backward == (0.2, 0.2, 0.2, 0.2)
    assert costs.duration_ms(0, OpKind.BW) == 4


@pytest.mark.parametrize("name", ["forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "activation_after_backward"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None, True])
def test_impossible_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*must be a finite number"):
        CostModel.uniform(Placement.linear(2), **{name: value})


def test_times_or_memory_that_are_all_almost_0_are_refused() -> None:
    small = {"forward_ms": 5e-324, "backward_ms": 1e-300, "wgrad_ms": 0.0}
    with pytest.raises(ConfigError, match="the largest value of forward_ms, backward_ms, wgrad_ms is 1e-300; it must be"):
        CostModel.uniform(Placement.linear(2), **small)
    assert CostModel.uniform(Placement.linear(2), **small | {"wgrad_ms": 1e-6}).forward_ms == (5e-324, 5e-324), "rounding noise"
    body = CostModel.uniform(Placement.linear(2)).to_json() | {"activation": [1e-20] * 2, "activation_after_backward": [0, 0]}
    with pytest.raises(ConfigError, match="the largest value of activation, activation_after_backward is 1e-20"):
        CostModel.from_json(body)


def test_a_recomputing_stage_needs_more_memory_after_b_and_reserves_it() -> None:
    costs = CostModel.uniform(Placement.linear(2))
    assert costs.reserved is costs
    recomputing = costs.with_lists(activation=(0.25, 1.0), activation_after_backward=(0.5, 0.75))
    assert recomputing.reserved == recomputing.with_lists(activation=(0.5, 1.0))
