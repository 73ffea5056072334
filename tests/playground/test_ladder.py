"""Plans that come better and better."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.anytime import Rung, anytime, best
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.playground.ladder import for_other_objective, seconds_by_effort, share_of_plan
from megatron.zerobubble.playground.problem import PageRequest, read_problem

TIMES = {"forward_ms": 18.5, "backward_ms": 18.1, "wgrad_ms": 9.3, "comm_ms": 0.6, "activation_after_backward": 0.37}


def problem(schedule: str, p: int = 4, m: int = 8, **changes: Any) -> PageRequest:
    body = {"num_ranks": p, "num_microbatches": m, "schedule": schedule, "times": TIMES, "objective": "makespan"}
    return read_problem(json.dumps(body | changes).encode())


def check(rungs: list[Rung], limit: float | None = None) -> None:
    """Never worse, ends at 1, and every plan keeps the limit."""
    reached = [rung.result.simulation.makespan_ms for rung in rungs]
    assert reached == sorted(reached, reverse=True)
    spent = [rung.spent for rung in rungs]
    assert spent == sorted(spent)
    assert spent[-1] == 1.0
    for rung in rungs:
        assert limit is None or max(rung.result.simulation.peak_memory) <= limit + 1e-9


def test_the_last_rung_is_what_the_planner_finds_with_that_effort() -> None:
    asked = problem("zbv", effort="fast", memory_limit=0.8)
    rungs = list(anytime(asked))
    check(rungs, limit=0.8)
    same = best(asked)
    assert rungs[-1].result.simulation.plan == same.simulation.plan
    assert rungs[0].spent == 0.0, "there is a plan before the search, although the hand-written schedule exceeds the limit"


@pytest.mark.parametrize("name", [info.name for info in known_schedules()])
def test_every_hand_written_schedule_is_shown(name: str) -> None:
    (rung,) = anytime(problem(name))
    assert rung.result.simulation.plan == build_plan(name, num_ranks=4, num_microbatches=8)
    assert rung.spent == 1.0


def test_auto_begins_with_the_best_hand_written_schedule_and_states_its_choice() -> None:
    rungs = list(anytime(problem("auto", effort="fast", memory_limit=1.0)))
    check(rungs, limit=1.0)
    assert "auto chose" in rungs[-1].result.verdict(Objective.MAKESPAN)


def test_post_validation_has_a_plan_of_its_own() -> None:
    asked = problem("zb", 4, 8, effort="fast", memory_limit=2.0)
    found = list(anytime(asked))[-1].result
    other = for_other_objective(asked, found).simulation
    assert other.span_ms < found.simulation.span_ms
    assert other.makespan_ms >= found.simulation.makespan_ms
    assert 0.0 < share_of_plan(asked) < 1.0
    plain = problem("zbv", 8, 24, effort="fast", times={})
    best = list(anytime(plain))[-1].result
    (base,) = anytime(problem("1f1b", 8, 24, times={}))
    speed = base.result.simulation.makespan_ms / best.simulation.makespan_ms
    assert speed == pytest.approx(1.23, abs=0.005)
    assert base.result.simulation.span_ms / for_other_objective(plain, best).simulation.span_ms == pytest.approx(1.29, abs=0.005)
    drawn = problem("zb", 4, 8)
    assert for_other_objective(drawn, found) is found
    assert share_of_plan(drawn) == 1.0


def test_times_of_efforts_follow_the_size_and_the_schedule() -> None:
    small, large = seconds_by_effort(problem("zbv")), seconds_by_effort(problem("zbv", 64, 512))
    assert list(small) == ["fast", "default", "max"]
    assert 0 < small["fast"] < small["default"] < small["max"]
    assert all(large[effort] > small[effort] for effort in small)
    assert seconds_by_effort(problem("auto", 64, 512))["fast"] > large["fast"]
    assert set(seconds_by_effort(problem("1f1b")).values()) == {0.0}


def test_a_limit_that_nothing_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match="the smallest that works"):
        list(anytime(problem("zbv", effort="fast", memory_limit=0.01)))
    with pytest.raises(PlanError, match=r"memory peaks at 1.0000 and the limit is 0.5000"):
        list(anytime(problem("1f1b", memory_limit=0.5)))
