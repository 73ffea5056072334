"""An anytime search: a ladder of searches with growing budgets, each yielding the best plan so far.

A single search returns a plan when its budget is spent. Here the hand-written schedule comes first, then searches with budgets
that grow about fivefold per rung, up to the requested effort: the page shows a plan at once and the user may stop at any time, at
the price of about a quarter more work. The last rung is the search of `zerobubble plan` with that effort.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan import planner
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import AUTO, Result, best_of, hand_written, searched
from megatron.zerobubble.plan.registry import schedule_info
from megatron.zerobubble.plan.search.assign import ITERATION_BUDGET
from megatron.zerobubble.plan.search.search import evaluations_per_second
from megatron.zerobubble.plan.search.search_options import Effort
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE
from megatron.zerobubble.playground.problem import PageRequest

_BETWEEN = 3e8
"""Budget of a rung between `fast` and `default`."""
_SECONDS_PER_CELL = 3e-4
"""Time of a search besides its budget, per rank and microbatch: seed orders and validation."""
_AUTO_SEARCHES = 7
"""Schedules that `auto` plans at most."""
_QUICK = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv")
"""Hand-written schedules that `auto` shows first; the others begin with list scheduling, which takes too long for that."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The result of one rung."""

    result: Result
    """The best plan so far."""
    spent: float
    """Fraction of the total work that is done, 0 to 1."""


def climb(problem: PageRequest) -> Iterator[Rung]:
    """Yield the best plan so far after every rung; the last one has `spent` 1.

    Raises:
        ConfigError: as raised by `make_plan`.
        PlanError: as raised by `make_plan`.
    """
    budgets = budgets_of(problem)
    best = _hand_written(problem)
    if best is not None:
        yield Rung(result=best, spent=0.0 if budgets else 1.0)
    elif budgets[0] > 0:  # the hand-written schedule exceeds the limit; the first plan of a search does not
        best = searched(problem, 0.0)
        yield Rung(result=best, spent=0.0)
    done = 0.0
    for budget in budgets:
        found = searched(problem, budget)
        if best is None or not problem.objective.of(found.simulation) > problem.objective.of(best.simulation):
            best = found
        done += budget
        yield Rung(result=best, spent=done / sum(budgets) if done else 1.0)


def budgets_of(problem: PageRequest) -> tuple[float, ...]:
    """Budgets of the searches after the hand-written schedule; empty if there is no search."""
    is_fixed = problem.is_plain and problem.schedule != AUTO and not schedule_info(problem.schedule).is_searched
    if is_fixed or problem.effort is None:
        # A fixed schedule is only checked against the limit. `auto` has no hand-written schedule of its own. Unequal microbatches
        # are always assigned, with half of the budget.
        least = 0.0 if problem.is_plain else 2 * ITERATION_BUDGET
        return () if problem.memory_limit is None and problem.schedule != AUTO else (least,)
    rungs = (Effort.FAST.budget, _BETWEEN, Effort.DEFAULT.budget, Effort.MAX.budget)
    return tuple(budget for budget in rungs if budget <= problem.effort.budget)


def share_of_climb(problem: PageRequest) -> float:
    """The share of `climb` in the work of both searches, 0 to 1; the rest is `for_other_objective`'s."""
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
    other = searched(replace(problem, objective=objective), budgets[-1])
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


def pareto(problem: PageRequest) -> Iterator[tuple[float, Result | None]]:
    """Yield the best plan of all schedules for every memory limit, None if no schedule fits.

    The iteration time never grows with the limit: a plan within a lower limit is kept if none better is found. A point takes as
    long as a search with the problem's effort, less once more memory gains nothing; without effort only the first policies of
    each schedule are tried.
    """

    def plan_within(limit: float, share: float) -> Result | None:
        asked = replace(problem, schedule=AUTO, num_chunks=None, max_pending_backward=None, memory_limit=limit)
        with suppress(ConfigError):  # too little memory for any schedule
            return searched(asked, share * budgets_of(asked)[-1])
        return None

    return planner.pareto(problem.memory_limits, plan_within, problem.objective)


def _hand_written(problem: PageRequest) -> Result | None:
    """The hand-written schedule, for `auto` the best of them; None if it exceeds the memory limit.

    Unequal microbatches are assigned to it, as by `zerobubble plan` without an effort.
    """
    if problem.schedule != AUTO:
        return _hand_written_one(problem)
    if problem.num_chunks is not None or problem.max_pending_backward is not None:
        return None  # the search rejects it with a message
    results = []
    for name in _QUICK:
        if max(problem.num_slices) > 1 and not schedule_info(name).takes_slices:
            continue
        try:
            results.append(_hand_written_one(replace(problem, schedule=name)))
        except PlanError:
            continue  # the table of costs is for another number of stages
    drawn = [result for result in results if result is not None]
    return best_of(drawn, problem.objective) if drawn else None


def _hand_written_one(problem: PageRequest) -> Result | None:
    found, limit = hand_written(problem), problem.memory_limit
    if limit is None:
        return found
    simulation = found.simulation
    if max(simulation.peak_memory) > limit + MEMORY_TOLERANCE:
        return None
    bound = lower_bound(simulation.plan.placement, problem.num_microbatches, simulation.costs, limit)
    return replace(found, bound=bound)
