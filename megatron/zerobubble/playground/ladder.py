"""The work of a search that the page asks for: how long it takes, and the plan for the other kind of optimizer step."""

from __future__ import annotations

from dataclasses import replace

from megatron.zerobubble.plan.anytime import budgets_of, searched
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import AUTO, Result
from megatron.zerobubble.plan.search.search import evaluations_per_second
from megatron.zerobubble.plan.search.search_options import Effort
from megatron.zerobubble.playground.problem import PageRequest

_SECONDS_PER_CELL = 3e-4
"""Time of a search besides its budget, per rank and microbatch: seed orders and validation."""
_AUTO_SEARCHES = 7
"""Schedules that `auto` plans at most."""


def share_of_plan(problem: PageRequest) -> float:
    """The share of `anytime` in the work of both searches, 0 to 1; the rest is `for_other_objective`'s."""
    budgets = budgets_of(problem)
    return sum(budgets) / (sum(budgets) + budgets[-1]) if any(budgets) else 1.0


def for_other_objective(problem: PageRequest, found: Result) -> Result:
    """The plan for the other kind of optimizer step, under the same limit; a run with that would not execute the plan found.

    Args:
        problem: the problem that was solved.
        found: its solution, which is returned if nothing is better, or if there is no search.
    """
    budgets = budgets_of(problem)
    objective = next(each for each in Objective if each is not problem.objective)
    if not any(budgets) or objective.of(found.simulation) <= objective.of(found.bound) * (1 + 1e-8):
        return found
    other = searched(problem.with_options(objective=objective), budgets[-1])
    return min(other, found, key=lambda result: objective.of(result.simulation))


def seconds_by_effort(problem: PageRequest) -> dict[str, float]:
    """About how many seconds a problem takes with each effort, both objectives included; 0 for a schedule without a search."""
    num_cells = problem.num_ranks * problem.num_microbatches * max(problem.num_slices)
    found = {}
    for effort in Effort:
        budgets = budgets_of(replace(problem, effort=effort))
        num_searches = _AUTO_SEARCHES if problem.schedule == AUTO else 1
        budgets = (*budgets, *budgets[-1:])  # the last one once more for the other objective
        seconds = sum(budgets) / evaluations_per_second() + len(budgets) * num_searches * num_cells * _SECONDS_PER_CELL
        found[effort.value] = seconds if any(budgets) else 0.0
    return found
