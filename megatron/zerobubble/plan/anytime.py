"""Answers to a request: the best plan, plans that get better and better, or the best plan for each of several memory limits.

A single search returns a plan when its budget is spent. `anytime` yields the hand-written schedule first, then searches with
budgets that grow about fivefold per rung, up to the requested effort: a page shows a plan at once and its user may stop at any
time, at the price of about a quarter more work. The last rung is what `best` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.pairing import with_pairs
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import AUTO, AUTO_MEMORY_LIMIT, ROUNDING, Result, best_of, make_plan
from megatron.zerobubble.plan.registry import plan_of, schedule_info
from megatron.zerobubble.plan.search.assign import ITERATION_BUDGET
from megatron.zerobubble.plan.search.search_options import Effort
from megatron.zerobubble.plan.search.search_progress import Progress
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE

Request = TypeVar("Request", bound=PlanRequest)

_BETWEEN = 3e8
"""Budget of a rung between `fast` and `default`."""
_QUICK = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv")
"""Hand-written schedules that `auto` shows first; the others begin with list scheduling, which takes too long for that."""


class Rung(NamedTuple):
    """The result of one search of several."""

    result: Result
    """The best plan so far."""
    spent: float
    """Fraction of the total work that is done, 0 to 1."""


class Point(NamedTuple):
    """The best plan for one memory limit."""

    limit: float
    """In units of 1F1B on rank 0."""
    found: Result | ConfigError
    """The error if nothing fits."""


def with_defaults(request: Request, *, effort: Effort | None = None) -> Request:
    """The request with the memory limit of `auto` where none is given, and with an effort.

    Args:
        request: one schedule, or `auto`.
        effort: where none is given and no hand-written order answers the request: `auto` and memory limits need a search.
    """
    limit = request.memory_limit
    if request.schedule == AUTO and limit is None:
        limit = AUTO_MEMORY_LIMIT * request.lengths.auto_memory_limit(request.num_ranks)
    chosen = request.effort or (None if limit is None else effort)
    return replace(request, options=replace(request.options, memory_limit=limit), effort=chosen)


def budgets_of(request: PlanRequest) -> tuple[float, ...]:
    """Budgets of the searches after the hand-written schedule; empty if there is none.

    A fixed schedule is only checked against the limit, and `auto` has no hand-written schedule of its own. Unequal microbatches
    are always assigned, with half of the budget.
    """
    is_fixed = request.is_plain and request.schedule != AUTO and not schedule_info(request.schedule).is_searched
    if is_fixed or request.effort is None:
        least = 0.0 if request.is_plain else 2 * ITERATION_BUDGET
        return () if request.memory_limit is None and request.schedule != AUTO else (least,)
    rungs = (Effort.FAST.budget, _BETWEEN, Effort.DEFAULT.budget, Effort.MAX.budget)
    return tuple(budget for budget in rungs if budget <= request.effort.budget)


def best(request: PlanRequest, progress: Progress | None = None) -> Result:
    """What a request asks for: the hand-written order without a limit and an effort, else the best plan found.

    Raises:
        ConfigError: see `make_plan`.
        PlanError: see `make_plan`.
    """
    budgets = budgets_of(request)
    return searched(request, budgets[-1], progress) if budgets else hand_written(request)


def anytime(request: PlanRequest) -> Iterator[Rung]:
    """Yield the best plan so far after every search; the last one has `spent` 1. Raises as `make_plan`."""
    budgets = budgets_of(request)
    found = _first(request)
    if found is not None:
        yield Rung(found, 0.0 if budgets else 1.0)
    elif budgets[0] > 0:  # the hand-written schedule exceeds the limit; the first plan of a search does not
        found = searched(request, 0.0)
        yield Rung(found, 0.0)
    done = 0.0
    for budget in budgets:
        other = searched(request, budget)
        if found is None or not request.objective.of(other.simulation) > request.objective.of(found.simulation):
            found = other
        done += budget
        yield Rung(found, done / sum(budgets) if done else 1.0)


def pareto(request: PlanRequest, limits: Iterable[float]) -> Iterator[Point]:
    """The best plan for each of some ascending memory limits, with the request's effort. What fits a limit fits any larger one.

    Once a larger limit gained nothing, and its plan fits the limit before, only hand-written orders are tried, until one gains.
    """
    most: Result | None = None
    before, share, objective = 0.0, 1.0, request.objective
    for limit in limits:
        asked = request.with_options(memory_limit=limit)
        budget = budgets_of(asked)[-1]
        try:
            found = searched(asked, share * budget)
            gains = most is None or objective.of(found.simulation) < objective.of(most.simulation) * (1 - ROUNDING)
            if share == 0.0 and gains:
                share, found = 1.0, searched(asked, budget)
        except ConfigError as error:  # too little memory for any schedule
            yield Point(limit, error)
            continue
        share = 1.0 if gains or max(found.simulation.peak_memory) > before else 0.0
        most, before = replace(found if most is None else best_of((most, found), objective), bound=found.bound), limit
        yield Point(limit, most)


def searched(request: PlanRequest, budget: float, progress: Progress | None = None) -> Result:
    """The best plan found with a budget. Raises as `make_plan`."""
    return make_plan(request.with_options(budget=budget, progress=progress))


def hand_written(request: PlanRequest) -> Result:
    """The schedule's own order without a search, with the lower bound at its own peak memory; its memory limit does not count.

    Unequal microbatches are assigned to it, with the objective and the seed of the request.
    """
    request.spec(max(request.num_slices))  # refuses what the schedule does not take
    options = replace(request.options, budget=ITERATION_BUDGET, memory_limit=None)
    found = []
    for n in request.num_slices:
        spec = request.spec(n)
        costs = request.costs_of(spec.placement, n)
        if costs.is_plain:
            plan = plan_of(spec, request.num_microbatches)
        else:
            plan = MicrobatchPlanner(spec, request.num_microbatches, options=options).plan(costs)
        found.append(Result.of(with_pairs(plan, costs, request.objective), costs))
    return min(found, key=lambda result: result.time_ms(request.objective))


def _first(request: PlanRequest) -> Result | None:
    """The hand-written schedule, for `auto` the best of them; None if it exceeds the memory limit."""
    if request.schedule != AUTO:
        return _within_limit(request)
    if request.num_chunks is not None or request.max_pending_backward is not None:
        return None  # the search rejects it with a message
    results = []
    for name in _QUICK:
        if max(request.num_slices) > 1 and not schedule_info(name).takes_slices:
            continue
        try:
            results.append(_within_limit(replace(request, schedule=name)))
        except PlanError:
            continue  # the table of costs is for another number of stages
    drawn = [result for result in results if result is not None]
    return best_of(drawn, request.objective) if drawn else None


def _within_limit(request: PlanRequest) -> Result | None:
    found, limit = hand_written(request), request.memory_limit
    if limit is None:
        return found
    simulation = found.simulation
    if max(simulation.peak_memory) > limit + MEMORY_TOLERANCE:
        return None
    bound = lower_bound(simulation.plan.placement, request.num_microbatches, simulation.costs, limit)
    return replace(found, bound=bound)
