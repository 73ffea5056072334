"""Costs of pairs, the orders made for them, and the choice of what to launch together."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.all_to_alls import exposed_ms, launch_ms
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.generators.waves import waves
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.pairing import marked, with_pairs
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.validate import validate
from tests.plan.test_communication import placements, random_plan


def costs_of(placement: Placement, forward: float, backward: float | None = None, **times: float) -> CostModel:
    shares = forward, forward if backward is None else backward
    return replace(CostModel.uniform(placement, **times), all_to_all=shares)


# -- the cost of a pair -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "kind", "together", "exposed"),
    [
        ((0.0, 0.0), "B", 5.0, 0.0),  # one after the other
        ((0.2, 0.2), "B", 4.0, 0.0),  # computation: 1.6 + 2.4
        ((0.5, 0.0), "B", 4.0, 0.0),  # 1 + 3
        ((0.5, 0.5), "B", 3.0, 0.5),  # no shorter than B alone
        ((0.9, 0.9), "B", 4.5, 4.0),  # communication: 1.8 + 2.7
        ((0.5, 0.5), "BW", 4.0, 0.5),  # no shorter than BW alone, of which only B's part communicates
        ((0.2, 0.2), "BW", 5.0, 0.0),
    ],
)
def test_a_pair_computes_for_one_op_and_communicates_for_one(
    shares: tuple[float, float], kind: str, together: float, exposed: float
) -> None:
    costs = costs_of(Placement.linear(2), *shares, forward_ms=2.0, backward_ms=3.0, wgrad_ms=1.0)
    pair = Op(0, OpKind.F, 2), Op(0, OpKind[kind], 1)
    assert launch_ms(costs, pair) == pytest.approx(together)
    assert exposed_ms(costs, pair) == pytest.approx(exposed)
    assert exposed_ms(costs, pair[:1]) == pytest.approx(2.0 * shares[0])
    assert launch_ms(costs, (Op(0, OpKind.W, 1),)) == 1.0
    assert exposed_ms(costs, (Op(0, OpKind.W, 1),)) == 0.0


def test_a_simulation_tells_exposed_from_hidden_communication() -> None:
    plan = Plan.from_json(
        '{"format": "zerobubble-plan/4", "schedule": "x", "num_ranks": 1, "num_microbatches": 2, "stage_to_rank": [0], '
        '"ops": [["0F0", "0F1+0B0", "0W0", "0B1", "0W1"]]}'
    )
    found = simulate(plan, costs_of(plan.placement, 0.25, forward_ms=4.0, backward_ms=4.0))
    assert [(start, end) for _, start, end in found.rows[0]] == [(0, 4), (4, 10), (4, 10), (10, 11), (11, 15), (15, 16)]
    assert found.communication_ms == ((2.0, 2.0),)
    assert found.metrics()["hidden_all_to_all_ms"] == [2.0]
    assert "hidden_all_to_all_ms" not in simulate(plan, CostModel.uniform(plan.placement)).metrics()
    assert found.bubble_rate == found.idle_share == 0.0


@pytest.mark.parametrize(
    ("ops", "share", "beside", "ends", "hidden"),
    [
        ("0F0 0B0 0F1 0W0 0B1 0W1", 0.25, 1.0, (4, 8, 12, 14, 18, 20), 2.0),  # W0 beside F1, and W1 beside its own B
        ("0F0 0B0 0F1 0W0 0B1 0W1", 0.25, 0.0, (4, 8, 12, 15, 19, 22), 0.0),
        ("0F0 0B0 0W0 0F1 0B1 0W1", 0.5, 1.0, (4, 8, 9, 13, 17, 18), 4.0),  # no more than both all-to-alls of B
        ("0F0 0F1 0B0 0B1 0W0 0W1", 0.5, 1.0, (4, 8, 12, 16, 17, 20), 2.0),  # W0 beside B1, and W1 not behind W0
        ("0F0 0F1 0B0 0B1 0W0 0W1", 1.0, 0.5, (4, 8, 12, 16, 17.5, 20.5), 1.5),  # half of W0 cannot
        ("0F0 0F1 0B0 0B1 0W0 0W1", 1.0, 1.0, (4, 8, 12, 16, 16, 19), 3.0),
        ("0F0 0F1+0B0 0B1 0W0 0W1", 0.25, 1.0, (4, 10, 10, 14, 16, 19), 3.0),  # none beside a pair
        ("0F0 0BW0 0F1 0BW1", 0.25, 1.0, (4, 11, 15, 22), 0.0),
    ],
)
def test_a_w_that_waits_is_computed_beside_all_to_alls_of_single_ops(
    ops: str, share: float, beside: float, ends: tuple[float, ...], hidden: float
) -> None:
    body = {"format": "zerobubble-plan/4", "schedule": "x", "num_ranks": 1, "num_microbatches": 2, "stage_to_rank": [0]}
    plan = Plan.from_json(json.dumps(body | {"ops": [ops.split()]}))
    costs = costs_of(plan.placement, share, forward_ms=4.0, backward_ms=4.0, wgrad_ms=3.0)
    found = simulate(plan, replace(costs, wgrad_beside=beside))
    assert tuple(op.end_ms for op in found.rows[0]) == pytest.approx(ends)
    ((exposed, beside_others),) = found.communication_ms
    assert beside_others == pytest.approx(hidden)
    assert found.early_wgrad_ms == (pytest.approx(hidden - 2 * len(plan.pairs)),)
    assert exposed + beside_others == pytest.approx(16 * share)


def test_shares_stay_with_costs_that_are_made_from_others() -> None:
    costs = replace(costs_of(Placement.v(2), 0.3, 0.4), wgrad_beside=0.5)
    others = (
        costs.divided(2),
        costs.divided(2).whole,
        costs.with_lists(forward_ms=(1.0, 2.0, 3.0, 4.0)),
        costs.with_links({(0, 1): LinkTime(1.0), (1, 0): LinkTime(5.0)}, 2).plain,
        costs.merged(2),
        CostModel.from_json(costs.to_json()),
    )
    assert {(each.all_to_all, each.wgrad_beside) for each in others} == {((0.3, 0.4), 0.5)}
    assert not {"all_to_all", "wgrad_beside"} & set(CostModel.uniform(Placement.v(2)).to_json())


def test_shares_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"all_to_all of B is 1\.5; it must be a finite number from 0 to 1"):
        costs_of(Placement.linear(2), 0.5, 1.5)
    with pytest.raises(PlanError, match="'all_to_all' must be a list of two shares"):
        CostModel.from_json(CostModel.uniform(Placement.linear(2)).to_json() | {"all_to_all": 0.5})
    assert main(["plan", "-p", "2", "-m", "4", "--all-to-all", "2"]) == 2
    assert "all-to-all is 2.0; give a share of F and of B, 0 to 1" in capsys.readouterr().err


# -- waves --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["V", "linear"])
def test_waves_are_valid_for_any_number_of_microbatches(kind: str, p: int) -> None:
    placement = Placement.v(p) if kind == "V" else Placement.linear(p)
    for m in (1, 2, p, 3 * p + 1):
        for splits in (False, True):
            for plan in waves("x", placement, m, costs_of(placement, 0.4), math.inf, splits=splits):
                validate(plan)
                assert splits or OpKind.W not in {op.kind for row in plan.ops for op in row}


@pytest.mark.parametrize(("share", "pair"), [(0.2, 1.6), (0.4, 1.2), (0.6, 1.2)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_v_with_pairs_takes_a_pair_and_a_w_per_microbatch(p: int, share: float, pair: float) -> None:
    """At (2p+1)/2p of 1F1B's memory: DualPipeV's, which is one."""
    placement, costs = Placement.v(p), costs_of(Placement.v(p), share)
    plan = with_pairs(build_plan("zbv", num_ranks=p, num_microbatches=4 * p), costs, Objective.MAKESPAN)
    assert max(simulate(plan, costs).peak_memory) == pytest.approx((2 * p + 1) / (2 * p))
    short, long = (min(_times("zbv", placement, m, costs)) for m in (3 * p, 5 * p))
    assert (long - short) / (2 * p) <= pair + 1 + 1e-9


@pytest.mark.parametrize("p", [2, 4, 8])
def test_one_stage_per_rank_with_pairs_takes_two_pairs_per_microbatch(p: int) -> None:
    """At (p+1)/p of 1F1B's memory; with twice that memory a pair and a W."""
    placement, costs = Placement.linear(p), costs_of(Placement.linear(p), 0.4)
    for limit, per_microbatch in (((p + 1) / p, 2.4), (2.0, 2.2)):
        short, long = (min(_times("zb", placement, m, costs, limit)) for m in (3 * p, 5 * p))
        assert (long - short) / (2 * p) == pytest.approx(per_microbatch)


def _times(name: str, placement: Placement, m: int, costs: CostModel, limit: float = 1.5) -> list[float]:
    p = placement.num_ranks
    plans = [plan for plan in waves(name, placement, m, costs, limit * p) if max(peak_memory(plan, costs)) <= limit + 1e-9]
    return [simulate(plan, costs).makespan_ms for plan in plans]


# -- the choice ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(placements(), st.integers(1, 4), st.integers(0, 10**6))
def test_marked_plans_are_valid_and_no_plan_beats_its_bound(placement: Placement, m: int, seed: int) -> None:
    choice = random.Random(seed)
    plan = replace(random_plan(placement, m, seed), pairs=frozenset())
    costs = costs_of(placement, choice.random(), choice.random(), forward_ms=2.0, comm_ms=choice.choice((0.0, 0.5)))
    costs = replace(costs, wgrad_beside=choice.choice((0.0, 0.5, 1.0)))
    assert marked(plan, costs_of(placement, 0.0), 1.0).pairs == frozenset()
    own = simulate(plan, costs)
    best = with_pairs(plan, costs, Objective.SPAN)
    validate(best)
    assert simulate(best, costs).span_ms <= own.span_ms
    for other in (plan, marked(plan, costs, choice.random()), best):
        validate(other)
        found = simulate(other, costs)
        bound = lower_bound(placement, m, costs, max(found.peak_memory))
        assert bound.span_ms <= found.span_ms * (1 + 1e-9)
        assert bound.makespan_ms <= found.makespan_ms * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "interleaved-1f1b"])
def test_a_memory_limit_holds_and_without_communication_nothing_changes(name: str) -> None:
    plan = build_plan(name, num_ranks=4, num_microbatches=12)
    peak = max(peak_memory(plan, CostModel.uniform(plan.placement)))
    assert with_pairs(plan, costs_of(plan.placement, 0.0), Objective.MAKESPAN) is plan
    for limit, beside in itertools.product((peak, 1.25 * peak, 2.0 * peak), (0.0, 1.0)):
        costs = replace(costs_of(plan.placement, 0.4), wgrad_beside=beside)
        found = with_pairs(plan, costs, Objective.MAKESPAN, limit)
        assert max(peak_memory(found, costs)) <= limit + 1e-9
        assert found.schedule == name
        assert {op.kind for row in found.ops for op in row} <= {op.kind for row in plan.ops for op in row} | {OpKind.BW}


def test_pairs_are_chosen_by_the_objective() -> None:
    """With slow ends of the pipeline the two iteration times have other best plans."""
    plan, times = build_plan("zb-h1", num_ranks=4, num_microbatches=4), (2.0, 1.0, 1.0, 2.0)
    costs = costs_of(plan.placement, 0.3).with_lists(forward_ms=times, backward_ms=times, wgrad_ms=times)
    by_span, by_makespan = (simulate(with_pairs(plan, costs, each), costs) for each in Objective)
    assert by_span.span_ms < by_makespan.span_ms
    assert by_makespan.makespan_ms < by_span.makespan_ms


@pytest.mark.parametrize(
    ("name", "share", "at_one", "with_one_more"), [("zb-h1", 0.2, 2.8, 2.6), ("zb-h1", 0.4, 2.6, 2.2), ("zbv", 0.4, 2.4, 2.2)]
)
def test_ws_that_wait_hide_all_to_alls_without_pairs_or_memory_for_them(
    name: str, share: float, at_one: float, with_one_more: float
) -> None:
    """At 1F1B's memory, and with an F of one stage more: what a microbatch takes in the steady state, of F = B = W = 1."""
    for limit, most in ((1.0, at_one), (None, with_one_more)):
        plans = [build_plan(name, num_ranks=4, num_microbatches=m) for m in (12, 20)]
        costs = replace(costs_of(plans[0].placement, share), wgrad_beside=1.0)
        found = [simulate(with_pairs(plan, costs, Objective.MAKESPAN, limit), costs) for plan in plans]
        assert limit is None or max(found[1].peak_memory) <= 1 + 1e-9
        assert (found[1].makespan_ms - found[0].makespan_ms) / 8 <= most + 1e-9


def test_the_command_shows_what_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--schedule", "zbv", "-p", "4", "-m", "8", "--all-to-all", "0.4", "--width", "200"]) == 0
    text = capsys.readouterr().out
    assert "2.100 ms exposed, 4.300 ms hidden, on average; 0 pairs of F and B that run together; 4.300 ms of W computed" in text
