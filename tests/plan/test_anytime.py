"""Plans that come better and better."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.anytime import Rung, anytime, best
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions

TIMES = {"forward_ms": 18.5, "backward_ms": 18.1, "wgrad_ms": 9.3, "comm_ms": 0.6, "activation_after_backward": 0.37}


def problem(schedule: str, *, effort: Effort | None = None, memory_limit: float | None = None) -> PlanRequest:
    options = SearchOptions(memory_limit=memory_limit)
    return PlanRequest(num_ranks=4, num_microbatches=8, schedule=schedule, times=TIMES, effort=effort, options=options)


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
    asked = problem("zbv", effort=Effort.FAST, memory_limit=0.8)
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
    rungs = list(anytime(problem("auto", effort=Effort.FAST, memory_limit=1.0)))
    check(rungs, limit=1.0)
    assert "auto chose" in rungs[-1].result.verdict(Objective.MAKESPAN)


def test_a_limit_that_nothing_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match="the smallest that works"):
        list(anytime(problem("zbv", effort=Effort.FAST, memory_limit=0.01)))
    with pytest.raises(PlanError, match=r"memory peaks at 1.0000 and the limit is 0.5000"):
        list(anytime(problem("1f1b", memory_limit=0.5)))
