"""`auto`: which families are searched, under what limit and with how much of the budget."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan import anytime, planner
from megatron.zerobubble.plan.communication import num_messages
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import CostsOf, PlanRequest
from megatron.zerobubble.plan.planner import AUTO, Result, make_plan
from megatron.zerobubble.plan.registry import (
    build_plan,
    known_schedules,
    parse_max_pending_backward,
    plans_of,
    schedule_info,
)
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.search_options import SearchOptions

BUDGET = 20_000.0
Searched = list[tuple[str, float, float]]


def long_last(placement: Placement) -> CostModel:
    """No schedule reaches its bound: a long last stage, slow links."""
    costs = CostModel.uniform(placement, backward_ms=1.1, wgrad_ms=0.6, comm_ms=0.1)
    return costs.with_lists(forward_ms=(*costs.forward_ms[:-1], 1.5 * costs.forward_ms[-1]))


def full_first(placement: Placement) -> CostModel:
    """The stages of rank 0 need twice the activation memory."""
    costs = long_last(placement)
    doubled = tuple(2 * each if placement.stage_to_rank[stage] == 0 else each for stage, each in enumerate(costs.activation))
    return costs.with_lists(activation=doubled, activation_after_backward=doubled)


def auto(monkeypatch: pytest.MonkeyPatch, costs_of: CostsOf, limit: float | None) -> tuple[Result, Searched]:
    """The result of `auto`, and its searches beyond hand-written orders, as (schedule, limit, share of the budget)."""
    searched: Searched = []

    def build(spec: ScheduleSpec, *arguments: Any, options: SearchOptions, **others: Any) -> Any:
        if spec.name in planner._SEARCHED:
            assert options.memory_limit is not None
            if options.budget > 0:
                searched.append((spec.name, options.memory_limit, options.budget / BUDGET))
        return plans_of(spec, *arguments, options=options, **others)

    monkeypatch.setattr(planner, "plans_of", build)
    options = SearchOptions(memory_limit=limit, objective=Objective.SPAN, budget=BUDGET)
    return make_plan(PlanRequest(schedule=AUTO, num_ranks=4, num_microbatches=8, stages=costs_of, options=options)), searched


@pytest.mark.parametrize(("costs_of", "enough"), [(long_last, 1.5), (full_first, 3.0)])
def test_a_v_is_searched_with_enough_memory_and_then_with_all(
    monkeypatch: pytest.MonkeyPatch, costs_of: CostsOf, enough: float
) -> None:
    for limit in (1.25, 2.5, 6.0, None):
        asked = math.inf if limit is None else limit
        limits = [(name, given) for name, given, _ in auto(monkeypatch, costs_of, limit)[1]]
        assert next(given for name, given in limits if name == "zbv") == min(asked, enough)
        assert set(limits) <= {("zbv", min(asked, enough)), ("zbv", asked), ("zb", asked), ("zb-interleaved", asked)}


def slow_links(placement: Placement) -> CostModel:
    """Links so slow that the pipeline needs more microbatches in flight than fit into a limit of 1.5."""
    return CostModel.uniform(placement, comm_ms=1.0)


def test_a_v_is_searched_with_more_memory_if_that_lowers_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    result, searched = auto(monkeypatch, slow_links, 2.0)
    assert ("zbv", 2.0) in {(name, given) for name, given, _ in searched}
    options = SearchOptions(memory_limit=2.0, objective=Objective.SPAN, budget=0.1 * BUDGET)
    zbv = make_plan(PlanRequest(schedule="zbv", num_ranks=4, num_microbatches=8, stages=slow_links, options=options))
    assert result.simulation.span_ms <= zbv.simulation.span_ms


def test_the_best_is_searched_longer_and_others_where_they_are_close(monkeypatch: pytest.MonkeyPatch) -> None:
    for close, places in ((0.0, 1), (10.0, 2)):
        monkeypatch.setattr(planner, "_CLOSE", close)
        result, searched = auto(monkeypatch, long_last, 2.5)
        assert {share for _, _, share in searched} == {0.1, 1.0}
        assert len({name for name, _, share in searched if share == 1.0}) == places
        assert result.runner_up is not None
        assert result.simulation.span_ms <= result.runner_up.simulation.span_ms


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "chosen", "messages", "equal", "runner_up"),
    [
        (4, 8, "zbv", 96, {"zb-interleaved"}, "zb"),
        (1, 3, "1f1b", 0, {"interleaved-1f1b", "1f1b-v", "zb", "zb-interleaved", "zbv"}, None),
    ],
)
def test_of_equally_fast_schedules_auto_takes_the_one_of_fewer_messages(
    num_ranks: int, num_microbatches: int, chosen: str, messages: int, equal: set[str], runner_up: str | None
) -> None:
    objective = Objective.MAKESPAN
    options = SearchOptions(memory_limit=1.0, objective=objective, budget=1e6)
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    result = make_plan(PlanRequest(schedule=AUTO, **sizes, stages=CostModel.uniform, options=options))
    assert (result.name, num_messages(result.simulation.plan)) == (chosen, messages)
    assert {each.name for each in result.equal} == equal
    verdict = result.verdict(objective)
    if runner_up is None:
        assert result.runner_up is None
        assert verdict.endswith("equal: " + ", ".join(f"{each.titled(each.name)} (as many messages)" for each in result.equal))
        return
    more = num_messages(result.equal[0].simulation.plan)
    assert f"; equal: zb-interleaved with 2 virtual stages (VPP) per rank ({more} messages, not {messages})" in verdict
    assert result.runner_up is not None
    assert result.runner_up.name == runner_up
    others = [
        make_plan(PlanRequest(schedule=name, **sizes, stages=CostModel.uniform, options=options)) for name in ("zb", "1f1b-v")
    ]
    best = min(objective.of(each.simulation) for each in others)
    assert objective.of(result.runner_up.simulation) == pytest.approx(best), "nothing that was passed over is faster"


def test_the_curve_is_searched_until_more_memory_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []

    def searched(request: PlanRequest, budget: float) -> Result:
        budgets.append(budget)
        return make_plan(request.with_options(budget=budget))

    monkeypatch.setattr(anytime, "budgets_of", lambda request: (BUDGET,))
    monkeypatch.setattr(anytime, "searched", searched)
    options = SearchOptions(objective=Objective.SPAN)
    request = PlanRequest(schedule=AUTO, num_ranks=4, num_microbatches=8, stages=slow_links, options=options)
    points = list(anytime.pareto(request, [0.01, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0]))
    assert isinstance(points.pop(0).found, ConfigError)
    found = [point.found for point in points if isinstance(point.found, Result)]
    at = [Objective.SPAN.of(each.simulation) for each in found]
    assert at == sorted(at, reverse=True)
    assert budgets.pop(0) == BUDGET, "of the limit that is too small"
    stop = budgets.index(0.0)
    assert at[stop - 2] == at[stop - 1] == at[stop], "after the first limit that gained nothing"
    assert max(found[stop - 1].simulation.peak_memory) <= points[stop - 2].limit
    assert budgets == [BUDGET] * stop + [0.0] * (len(points) - stop)
    for point, each in zip(points, found, strict=True):
        assert max(each.simulation.peak_memory) <= point.limit + 1e-9


@pytest.mark.parametrize("seed", range(24))
def test_auto_is_no_worse_than_the_schedules_it_chooses_from(seed: int) -> None:
    """Each searched by name with the same options; random times and links, a random memory limit."""
    random = Random(seed)
    p, objective, limit = random.choice([2, 3, 4]), random.choice(list(Objective)), random.choice([0.75, 1.0, 1.5, 2.0])
    m, names = p * random.choice([1, 2, 3]), ("forward_ms", "backward_ms", "wgrad_ms")
    costs_of = partial(
        CostModel.uniform,
        **{name: random.uniform(5.0, 20.0) for name in names},
        comm_ms=random.choice([0.0, 0.3, 1.0]),
        activation_after_backward=random.uniform(0.2, 1.0),
    )

    def found(name: str, num_chunks: int | None) -> float:
        options = SearchOptions(memory_limit=limit, objective=objective, budget=4e6)
        result = make_plan(
            PlanRequest(schedule=name, num_ranks=p, num_microbatches=m, stages=costs_of, options=options, num_chunks=num_chunks)
        )
        return objective.of(result.simulation)

    best = found(AUTO, None)
    for name, num_chunks in planner._FAMILIES:
        with suppress(ConfigError, PlanError):  # it does not fit the limit
            assert best <= found(name, num_chunks) * (1 + 1e-9), name


def test_families_that_cannot_win_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With F=B=W and free links the first family has no bubble."""
    result, searched = auto(monkeypatch, CostModel.uniform, 2.0)
    assert result.simulation.bubble_rate == pytest.approx(0, abs=1e-12)
    assert {name for name, _, _ in searched} == {"zb"}


def test_the_bound_is_one_of_all_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (0.75, 1.0, 2.5):
        result, _ = auto(monkeypatch, long_last, limit)
        bound, found = result.bound, result.simulation
        assert bound.span_ms <= found.span_ms
        assert bound.makespan_ms <= found.makespan_ms
        assert bound.bubble_rate <= found.bubble_rate


@pytest.mark.parametrize("times", [(1, 1, 1, 0), (1, 2, 0.01, 0), (1, 1, 1, 1), (1, 0.2, 2, 0.5), (3, 1, 0.2, 2), (1, 3, 1, 3)])
@pytest.mark.parametrize(("searched", "fused"), [("zb", "1f1b"), ("zbv", "1f1b-v"), ("zb-interleaved", "interleaved-1f1b")])
def test_with_given_chunks_no_other_schedule_is_faster(searched: str, fused: str, times: tuple[float, ...]) -> None:
    """So `auto` in a run searches one family; F, B, W and a message take `times`. Without a budget: the orders it begins with."""
    forward, backward, wgrad, message = times

    def makespan(name: str) -> float:
        def costs_of(placement: Placement) -> CostModel:
            each = {"forward_ms": forward, "backward_ms": backward, "wgrad_ms": wgrad}
            lists = {kind: (float(value),) * placement.num_stages for kind, value in each.items()}
            return CostModel.uniform(placement, comm_ms=message).with_lists(**lists)

        options = SearchOptions(memory_limit=1.5, budget=0.0)
        return make_plan(
            PlanRequest(schedule=name, num_ranks=4, num_microbatches=8, stages=costs_of, options=options)
        ).simulation.makespan_ms

    assert makespan(searched) <= makespan(fused)


NAMES = [info.name for info in known_schedules()]


def sliced(num_slices: list[int], *, limit: float = 1.0, loss: float = 0.0, name: str = AUTO) -> Result:
    """p=4, m=4; each slice takes `loss` of the microbatch's time besides its part."""

    class Lossy(PlanRequest):
        def costs_of(self, placement: Placement, num_slices: int = 1) -> CostModel:
            costs, n = self.mean_costs(placement), num_slices
            longer = {each: tuple(value * (1 + loss * n) for value in costs.lists[each]) for each in COST_LISTS[:3]}
            return (costs.with_lists(**longer) if n > 1 else costs).divided(n)

    options = SearchOptions(memory_limit=limit, budget=BUDGET, objective=Objective.SPAN)
    sizes = {"num_ranks": 4, "num_microbatches": 4, "num_slices": tuple(num_slices)}
    return make_plan(Lossy(schedule=name, options=options, **sizes))


def test_auto_cuts_microbatches_into_slices_where_that_is_faster() -> None:
    whole, cut, both = sliced([1], limit=0.5), sliced([4], limit=0.5), sliced([4, 1], limit=0.5)
    assert (whole.num_slices, cut.num_slices, both.num_slices) == (1, 4, 4)
    assert both.simulation.span_ms < 0.9 * whole.simulation.span_ms
    assert both.bound.span_ms <= min(whole.bound.span_ms, cut.bound.span_ms)
    assert max(both.simulation.peak_memory) <= 0.5 + 1e-9
    assert "in 4 slices per microbatch" in both.verdict(Objective.SPAN)


def test_short_slices_that_lose_efficiency_are_not_chosen() -> None:
    assert sliced([1, 2, 8], loss=0.001).num_slices == 2
    assert sliced([1, 2, 8], loss=0.2).num_slices == 1
    assert sliced([1, 2, 8], loss=0.2, name="zb").num_slices == 1


def test_of_equally_good_plans_the_one_of_fewer_slices_is_chosen() -> None:
    for name in (AUTO, "zb"):
        found = make_plan(
            PlanRequest(
                schedule=name,
                num_ranks=1,
                num_microbatches=7,
                stages=lambda placement: CostModel.uniform(placement, forward_ms=0.1, backward_ms=0.7),
                options=SearchOptions(memory_limit=1.0, budget=0.0),
                num_slices=(3, 1, 2),
            )
        )
        assert found.num_slices == 1


def test_slices_under_unequal_links_and_of_schedules_without_them_are_refused_in_one_line() -> None:
    def unequal(placement: Placement) -> CostModel:
        return replace(CostModel.uniform(placement), links=Links(latency_ms=((0.0, 1.0), (2.0, 0.0))))

    for name in (AUTO, "zb", "1f1b"):
        with pytest.raises(ConfigError, match=r"^2 slices per microbatch cannot be planned with unequal links;") as caught:
            make_plan(
                PlanRequest(
                    schedule=name,
                    num_ranks=2,
                    num_microbatches=4,
                    stages=unequal,
                    options=SearchOptions(budget=0.0),
                    num_slices=(1, 2),
                )
            )
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="schedule 'zb-interleaved' has no order of slices"):
        sliced([1, 2], name="zb-interleaved")
    with pytest.raises(ConfigError, match="num_slices is 0; it must be a whole number, 1 or more"):
        sliced([0, 2])


def test_the_schedules_we_know() -> None:
    hand_written = ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb", "zbv"]
    searched = ["v-half", "v-min", "1f1b-v", "zb-interleaved", "zb-w"]
    assert [info.name for info in known_schedules()] == hand_written + searched
    for info in known_schedules():
        assert info.description
        assert info.reference.startswith("arXiv ")
        plan = build_plan(info.name, num_ranks=3, num_microbatches=4)
        assert plan.schedule == info.name
        assert plan.placement.name == info.placement
        assert plan.placement.num_chunks == info.default_num_chunks


@pytest.mark.parametrize(
    ("given", "closest"), [("zb-v", "zbv"), ("ZBH1", "zb-h1"), ("1F1B", "1f1b"), ("interleaved-1f", "interleaved-1f1b")]
)
def test_an_unknown_name_gets_the_closest(given: str, closest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{closest}'") as caught:
        schedule_info(given)
    for info in known_schedules():
        assert info.name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_ranks": True}, "num_ranks is True"),
        ({"num_microbatches": -1}, "num_microbatches is -1"),
        ({"num_microbatches": 2.5}, "num_microbatches is 2.5"),
        ({"num_chunks": 0}, "num_chunks is 0"),
        ({"num_chunks": 2}, "'zb' has 1 stage"),
        ({"max_pending_backward": 0}, "max_pending_backward is 0"),
        ({"name": "zb-h1", "max_pending_backward": 4}, "'zb-h1' has a fixed number of pending"),
        ({"name": "zbv", "num_chunks": 1}, "'zbv' has 2 stage"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    name = options.pop("name", "zb")
    arguments = {"num_ranks": 2, "num_microbatches": 4} | options
    with pytest.raises(ConfigError, match=message) as caught:
        build_plan(name, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("1p", 8), ("2p", 16), ("2P", 16), (" 5 ", 5), ("1", 1)])
def test_max_pending_backward(text: str, value: int) -> None:
    assert parse_max_pending_backward("--pending", text, 8) == value


@pytest.mark.parametrize("text", ["", "p", "0", "0p", "-1", "1.5p", "auto", "2pp"])
def test_max_pending_backward_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--pending is .*1p or 2p"):
        parse_max_pending_backward("--pending", text, 8)
