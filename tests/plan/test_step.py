"""What surrounds the passes of an iteration: both times with it by hand, monotone, and as before where it is nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.anytime import best
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.step_costs import STEP_TIMES, StepCosts
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import StepTimes, read_plan, simulate
from megatron.zerobubble.plan.transforms import reductions_beside_tail
from tests.support.plans import plan_of_text


def _step(stages: int, ranks: int, **given: Any) -> StepCosts:
    """Nothing but what is given."""
    none: dict[str, Any] = dict.fromkeys(STEP_TIMES[:2], ((),) * stages) | dict.fromkeys(STEP_TIMES[2:], (0.0,) * ranks)
    return StepCosts(**none | given)


def _times(plan: Plan, **given: Any) -> tuple[float, float]:
    """(makespan, span) with what surrounds the passes; F, B and W of a stage take 2, 4 and 6 ms."""
    lists: dict[str, Any] = {"forward_ms": 2.0, "backward_ms": 4.0, "wgrad_ms": 6.0}
    lists |= dict.fromkeys(("activation", "activation_after_backward"), 1.0)
    costs = CostModel.of_lists({name: (value,) * plan.num_stages for name, value in lists.items()})
    step = simulate(plan, replace(costs, step=_step(plan.num_stages, plan.num_ranks, **given))).step
    assert step is not None
    return step.makespan_ms, step.span_ms


def _plan(stage_to_rank: tuple[int, ...], num_microbatches: int, *rows: str) -> Plan:
    return plan_of_text("\n".join(rows), schedule="x", placement=Placement(stage_to_rank), num_microbatches=num_microbatches)


ONE = _plan((0,), 1, "0F0 0BW0")
"""Runs from 0 to 12; its BW begins at 2."""
TAIL = _plan((0, 1), 2, "0F0 0F1 0B0 0B1 0W0 0W1", "1F0 1B0 1F1 1B1 1W0 1W1")
"""Rank 0: F 0-4, B 8-12 and 14-18, W 18-30. Rank 1: F 2-4, B 4-8, F 8-10, B 10-14, W 14-26."""
TWO = _plan((0, 0), 1, "0F0 1F0 1BW0 0BW0")
"""One rank: F 0-2 and 2-4, BW of stage 1 4-14, of stage 0 14-24."""


@pytest.mark.parametrize(
    ("plan", "given", "makespan", "span"),
    [
        # two buckets are complete in the middle of BW and at its end: 7 + 1, then 12 + 3
        (ONE, {"reduce_ms": ((1.0, 1.0),)}, 13, 13),
        # the first is a quarter of the gradients: complete after 4.5, and 12.5 behind it until 17
        (ONE, {"reduce_ms": ((3.0, 9.0),)}, 21, 21),
        (ONE, {"reduce_ms": ((3.0, 9.0),), "beside_passes": False}, 24, 24),
        # one after another: the second waits for the first, 7 to 17 and 17 to 27
        (ONE, {"reduce_ms": ((10.0, 10.0),)}, 27, 27),
        # the Ws behind the last B complete a bucket each, 20 and 26 of rank 1
        (TAIL, {"reduce_ms": ((), (8.0, 8.0))}, 36, 34),
        (TAIL, {"reduce_ms": ((8.0, 8.0), ())}, 40, 40),
        # the last stage is reduced beside the other one's backward
        (TWO, {"reduce_ms": ((), (9.0,))}, 24, 24),
        (TWO, {"reduce_ms": ((1.0,), (9.0,))}, 25, 25),
        (TWO, {"reduce_ms": ((1.0,), (11.0,))}, 26, 26),
        # the first F computes half of its layers when half of the parameters are there
        (ONE, {"gather_ms": ((3.0,),)}, 15, 15),
        (ONE, {"gather_ms": ((0.5, 0.5),)}, 12.5, 12.5),
        (ONE, {"gather_ms": ((4.0, 4.0),)}, 19, 19),
        # stage 1's are gathered beside stage 0's F
        (TWO, {"gather_ms": ((1.0,), (2.0,))}, 25, 25),
        (TWO, {"gather_ms": ((1.0,), (5.0,))}, 28, 28),
        # rank 1 steps while rank 0 begins, and takes no snapshot without post-validation
        (TAIL, {"optimizer_ms": (3.0, 0.0), "snapshot_ms": (1.0, 1.0)}, 33, 34),
        (TAIL, {"optimizer_ms": (0.0, 2.0), "snapshot_ms": (1.0, 0.0)}, 30, 31),
        (TAIL, {"optimizer_ms": (0.0, 5.0)}, 33, 30),
    ],
)
def test_iteration_times_by_hand(plan: Plan, given: dict[str, Any], makespan: float, span: float) -> None:
    assert _times(plan, **given) == pytest.approx((makespan, span))


SCHEDULES = [info.name for info in known_schedules()]
NAMES = st.sampled_from(SCHEDULES)
AMOUNT = st.floats(0.0, 20.0)


@given(NAMES, st.integers(1, 4), st.integers(1, 6), st.lists(AMOUNT, min_size=4, max_size=4), st.integers(0, 3), AMOUNT)
def test_more_of_anything_makes_no_iteration_shorter(
    name: str, p: int, m: int, values: list[float], which: int, more: float
) -> None:
    plan = reductions_beside_tail(build_plan(name, num_ranks=p, num_microbatches=m))
    costs, times = CostModel.uniform(plan.placement, comm_ms=0.1), dict(zip(STEP_TIMES, values, strict=True))
    found = []
    for each in (times, times | {STEP_TIMES[which]: values[which] + more}):
        with_step = replace(costs, step=StepCosts.uniform(plan.placement, **each))
        simulation, bound = simulate(plan, with_step), lower_bound(plan.placement, m, with_step)
        found.append([objective.of(simulation) for objective in Objective])
        for objective, own in zip(Objective, found[-1], strict=True):
            assert own >= objective.of_passes(simulation) - 1e-9
            assert own >= objective.of(bound) - 1e-9
    assert all(after >= before - 1e-9 for before, after in zip(*found, strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_around_the_passes_is_as_before(name: str) -> None:
    plan = build_plan(name, num_ranks=3, num_microbatches=5)
    costs = CostModel.uniform(plan.placement, forward_ms=1.1, backward_ms=0.7, wgrad_ms=0.3, comm_ms=0.07)
    plain, none = simulate(plan, costs), simulate(plan, replace(costs, step=StepCosts.uniform(plan.placement)))
    assert plain.step is None
    assert none.step == StepTimes(span_ms=plain.span_ms, makespan_ms=plain.makespan_ms)
    assert none.rows == plain.rows
    assert "step" not in costs.to_json()
    assert set(none.metrics()) - set(plain.metrics()) == {"step_span_ms", "step_makespan_ms"}


def test_a_plan_file_has_it_and_other_stages_follow() -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=4)
    step = StepCosts(
        reduce_ms=((1.0,), (2.0, 3.0), (), (4.0,)),
        gather_ms=((1.0,), (2.0,), (), (3.0,)),
        optimizer_ms=(5.0, 6.0),
        snapshot_ms=(7.0, 8.0),
        beside_passes=False,
    )
    costs = replace(CostModel.uniform(plan.placement), step=step)
    text = plan.to_json(costs=costs.to_json())
    assert json.loads(text)["format"] == "zerobubble-plan/1", "older versions run it"
    assert read_plan(text) == (plan, costs)
    assert costs.divided(2).step == costs.plain.step == step
    two = costs.merged(2).step
    assert two is not None
    assert two.reduce_ms == ((2.0, 3.0, 1.0), (4.0,)), "the last layers come first"
    assert two.gather_ms == ((1.0, 2.0), (3.0,))
    assert (two.optimizer_ms, two.snapshot_ms, two.beside_passes) == ((5.0, 6.0), (7.0, 8.0), False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce_ms": [[1], [-1]]}, "reduce_ms of stage 1, bucket 0 is -1"),
        ({"reduce_ms": [1, 1]}, "'reduce_ms' of 'step' must be a list of one list of buckets per stage"),
        ({"optimizer_ms": None}, "'optimizer_ms' of 'step' must be a list of one number per rank"),
        ({"snapshot_ms": [1, 2, 3]}, "optimizer_ms of 2 ranks and snapshot_ms of 3"),
        ({"reduce_ms": [[]], "gather_ms": [[]]}, "2 stages and step of 1"),
        ({"optimizer_ms": [1], "snapshot_ms": [1]}, "step has 2 stages and 1 ranks, and the plan 2 stages and 2 ranks"),
        ({"beside_passes": 1}, "'beside_passes' of 'step' must be true or false"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    plan = build_plan("1f1b", num_ranks=2, num_microbatches=2)
    body = CostModel.uniform(plan.placement).to_json() | {"step": StepCosts.uniform(plan.placement).to_json() | change}
    with pytest.raises((ConfigError, PlanError), match=message.replace("[", r"\[")):
        simulate(plan, CostModel.from_json(body))


def test_auto_and_searches_choose_by_the_whole_step() -> None:
    """The plan is the one that runs beside reductions, and no slower than a hand-written one."""
    request = PlanRequest(
        schedule="auto",
        num_ranks=4,
        num_microbatches=4,
        effort=Effort.FAST,
        step={"reduce_ms": 6.0, "optimizer_ms": 2.0},
        options=SearchOptions(memory_limit=2.0),
    )
    found = best(request)
    plan = found.simulation.plan
    assert reductions_beside_tail(plan) == plan
    own = Objective.MAKESPAN.of(found.simulation)
    assert own > found.simulation.makespan_ms + 2.0
    for name in ("1f1b", "zb-h1", "zb-h2", "zbv", "zb"):
        other = best(replace(request, schedule=name, effort=None, options=SearchOptions())).simulation
        assert own <= Objective.MAKESPAN.of(other) * (1 + 1e-9), name


def test_the_commands_take_and_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-p", "2", "-m", "2", "--reduce-ms", "3", "--gather-ms", "1", "--optimizer-ms", "2", "--snapshot-ms", "0.5"]
    assert main(["plan", "--schedule", "zb-h1", *words, "--json", "-"]) == 0
    plan, costs = read_plan(capsys.readouterr().out)
    assert costs is not None
    assert costs.step == StepCosts.uniform(plan.placement, reduce_ms=3, gather_ms=1, optimizer_ms=2, snapshot_ms=0.5)
    simulation = simulate(plan, costs)
    assert main(["plan", "--schedule", "zb-h1", *words]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("with reductions over replicas"))
    assert f"{Objective.MAKESPAN.of(simulation):.3f} ms with the synchronous optimizer" in line
    assert main(["compare", "--schedules", "1f1b,zb-h1", *words, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[1]["iteration_ms"] == Objective.MAKESPAN.of(simulation)
    assert rows[1]["bubble"] == Objective.MAKESPAN.bubble_of(simulate(plan, replace(costs, step=None)))
    assert main(["plan", "--schedule", "zb-h1", *words[:4], "--reduce-ms", "-1"]) == 2
    assert "reduce_ms is -1.0; it must be a finite number from 0" in capsys.readouterr().err
