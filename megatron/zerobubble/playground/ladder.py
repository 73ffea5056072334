"""Better and better plans of one problem, each as soon as there is one.

A search of `megatron.zerobubble.plan` answers when its budget is spent. Here the drawn order comes first, then searches with
budgets that grow about five times a rung, up to the effort that was asked for: a person sees a picture at once and may stop at
any time, for about a quarter more work in all. The last rung is what `zerobubble plan` does with that effort.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.planner import AUTO, Result, make_plan
from megatron.zerobubble.plan.registry import build_plan, schedule_info
from megatron.zerobubble.plan.search.bound import lower_bound
from megatron.zerobubble.plan.search.search import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE
from megatron.zerobubble.playground.problem import Problem

_BETWEEN = 3e8
"""A rung between `fast` and `default`."""
_QUICK = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv")
"""Schedules that are drawn at once; the others begin with list schedules, which takes `auto` too long for a first picture."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One answer."""

    result: Result
    """The best so far."""
    spent: float
    """Share of all the work that is done, 0..1."""


def climb(problem: Problem) -> Iterator[Rung]:
    """Yield the best so far whenever a rung is done; the last one has `spent` 1.

    Raises:
        ConfigError: as `make_plan`.
        PlanError: likewise.
    """
    budgets = budgets_of(problem)
    best = _drawn(problem)
    if best is not None:
        yield Rung(result=best, spent=0.0 if budgets else 1.0)
    elif budgets[0] > 0:  # the limit is below the drawing's: what a search begins with keeps it
        best = _searched(problem, 0.0)
        yield Rung(result=best, spent=0.0)
    done = 0.0
    for budget in budgets:
        found = _searched(problem, budget)
        if best is None or not problem.objective.of(found.simulation) > problem.objective.of(best.simulation):
            best = found
        done += budget
        yield Rung(result=best, spent=done / sum(budgets) if done else 1.0)


def budgets_of(problem: Problem) -> tuple[float, ...]:
    """Budgets of the searches that follow on the drawn order; empty where that is all there is."""
    is_fixed = problem.schedule != AUTO and not schedule_info(problem.schedule).is_searched
    if is_fixed or problem.effort is None:
        # An order that is fixed is held against a limit; nothing is searched for. `auto` has no drawing of its own.
        return () if problem.memory_limit is None and problem.schedule != AUTO else (0.0,)
    rungs = (Effort.FAST.budget, _BETWEEN, Effort.DEFAULT.budget, Effort.MAX.budget)
    return tuple(budget for budget in rungs if budget <= problem.effort.budget)


def pareto(problem: Problem) -> Iterator[tuple[float, Result | None]]:
    """For every limit the best plan of all schedules, None where nothing fits. What fits less memory fits more: never worse.

    A point takes as long as a search with the problem's effort; without one the first policies of each schedule are tried.
    """
    best: Result | None = None
    for limit in problem.memory_limits:
        asked = replace(
            problem,
            schedule=AUTO,
            num_chunks=None,
            max_pending_backward=None,
            memory_limit=limit,
        )
        try:
            found = _searched(asked, budgets_of(asked)[-1])
        except ConfigError:
            yield limit, None  # too little for any schedule
            continue
        if best is None or problem.objective.of(found.simulation) < problem.objective.of(best.simulation):
            best = found
        best = replace(best, bound=found.bound)
        yield limit, best


def _searched(problem: Problem, budget: float) -> Result:
    return make_plan(
        problem.schedule,
        num_ranks=problem.num_ranks,
        num_microbatches=problem.num_microbatches,
        costs_of=problem.costs_of,
        options=SearchOptions(memory_limit=problem.memory_limit, objective=problem.objective, seed=problem.seed, budget=budget),
        num_chunks=problem.num_chunks,
        max_pending_backward=problem.max_pending_backward,
    )


def _drawn(problem: Problem) -> Result | None:
    """The order that no search has touched, or of all schedules the best one for `auto`; None where it breaks the limit."""
    if problem.schedule != AUTO:
        return _one_drawn(problem)
    if problem.num_chunks is not None or problem.max_pending_backward is not None:
        return None  # refused by the search, which says why
    results = []
    for name in _QUICK:
        try:
            results.append(_one_drawn(replace(problem, schedule=name)))
        except PlanError:
            continue  # the table is for another number of stages
    return min(filter(None, results), key=lambda result: problem.objective.of(result.simulation), default=None)


def _one_drawn(problem: Problem) -> Result | None:
    plan = build_plan(
        problem.schedule,
        num_ranks=problem.num_ranks,
        num_microbatches=problem.num_microbatches,
        num_chunks=problem.num_chunks,
        max_pending_backward=problem.max_pending_backward,
    )
    costs = problem.costs_of(plan.placement)
    simulation = simulate(plan, costs)
    peak = max(simulation.peak_memory)
    if problem.memory_limit is not None and peak > problem.memory_limit + MEMORY_TOLERANCE:
        return None
    limit = peak if problem.memory_limit is None else problem.memory_limit
    return Result(simulation, lower_bound(plan.placement, plan.num_microbatches, costs, limit), plan.placement.num_chunks)
