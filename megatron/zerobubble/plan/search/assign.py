"""Assignment of unequal microbatches to the places of a plan, and the order of ops that suits them.

A schedule for equal microbatches keeps its ranks busy because everything in a column takes the same time. With unequal ones each
rank waits for the longest pass near it. Which microbatch runs when is free, though: within a global batch their order does not
change the sum of the gradients. So a microbatch of the plan is a *slot*, and the search looks for the permutation of the data
that suits the slots: long ones side by side in the middle, short ones at both ends, where all ranks wait for one. Meanwhile it
moves ops as for equal microbatches (`core`), and W fills what remains. Where microbatches have different numbers of slices, these
move with the data: slots then have as many passes as the microbatch that they run, and the order is one of passes.

The result is never slower than the plan it starts from with the data in the order in which it came, nor sorted by length,
wherever those fit the memory limit. A long microbatch counts there for several short ones. Equal costs give the plan itself, to
the op. The budget is in op evaluations, so every rank that plans for the same lengths finds the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.ir import OpKind, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.search.core import Core
from megatron.zerobubble.plan.search.interface import Order, Problem
from megatron.zerobubble.plan.search.orders import order_of, plan_of_order, without_wgrad
from megatron.zerobubble.plan.search.search_options import SearchOptions, check_memory_limit
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.transforms import recut, split_fused
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE

ITERATION_BUDGET = 1e6
"""Op evaluations for one iteration's plan: about 20 ms of the compiled core."""

_PATIENCE = 0.45
_PATIENCES = (0.2, 0.45, 0.9)
_PROBE_SHARE = 0.3
_SMALL_ROUND = 5e5
_MOST_ROUNDS = 8
_TEMPERATURES = (0.02, 0.005)
"""Initial thresholds of the first rounds and of the last one, as shares of the bottleneck rank's time per microbatch."""
_EXCESS_ROUNDS = 30.0
"""Memory above the limit, of one microbatch, is charged like this many times the bottleneck rank's time per microbatch."""


class _Found(NamedTuple):
    """An order with the assignment for which it is complete, and the rows from which annealing goes on."""

    objective: float
    order: Order
    assignment: list[int]


class _Start(NamedTuple):
    score: float
    rows: Order
    patience: list[float]
    assignment: list[int]


def assign(
    base: Plan, costs: CostModel, options: SearchOptions, *, others: Sequence[Plan] = (), fixed_order: bool = False
) -> Plan:
    """The best order and assignment found for these microbatches and links.

    Args:
        base: the schedule's own plan, with split backwards or with none. With slices it is for the data as it comes.
        costs: costs per microbatch as the data comes, and links. With plain costs the base is returned.
        options: objective, seed, budget, and the memory limit; None: the most that the base needs with the data as it comes
            or sorted by length, for which a run has to have the memory anyway.
        others: plans of the same placement and microbatches to start from as well, for example with less memory, for limits that
            the base exceeds.
        fixed_order: change the assignment only; W still runs early where the memory limit demands it.

    Raises:
        ConfigError: a limit that the largest microbatch alone exceeds, or slices under a matrix of links.
        PlanError: costs for another number of stages, ranks or microbatches; a plan with fused and split backwards; with
            `fixed_order`, no assignment found that fits the memory limit.
    """
    costs.check_fits(base.placement, base.num_microbatches)
    if costs.is_plain:
        return base
    check_sliceable(base.num_slices, costs)
    check_memory_limit(base.placement, base.num_microbatches, costs, options.memory_limit)
    return _Search([base, *others], costs, options, fixed_order).best()


def check_sliceable(num_slices: int, costs: CostModel) -> None:
    """Raise ConfigError for slices under a matrix of links."""
    if num_slices > 1 and costs.links is not None:
        raise ConfigError(f"{num_slices} slices per microbatch cannot be planned with unequal links; give equal ones, or 1 slice")


class _Search:
    """The state of one search."""

    def __init__(self, bases: Sequence[Plan], costs: CostModel, options: SearchOptions, fixed_order: bool) -> None:
        self._bases, self._costs, self._options, self._fixed = bases, costs, options, fixed_order
        self._base = bases[0]
        self._fused = _is_fused(self._base)
        self._m = self._base.num_microbatches
        stages = self._base.placement.rank_to_stages
        self._bottleneck_ms = max(
            math.fsum(costs.forward_ms[s] + costs.backward_ms[s] + costs.wgrad_ms[s] for s in own) for own in stages
        )
        self._came = list(self._base.assignment) or list(range(self._m))
        self._ascending = sorted(range(self._m), key=self._work_ms)
        self._slices = [costs.table.counts[costs.table.column(i)] for i in range(self._m)]
        self._reserved = costs if self._fused else costs.reserved
        limit = options.memory_limit
        self._limit = max(self._peaks(self._reserved)) if limit is None else float(limit)
        self._core = self._make_core()
        self._found: list[_Found] = []
        self._seed = options.seed * 1_000_003

    def _work_ms(self, microbatch: int) -> float:
        stages = range(self._base.num_stages)
        return math.fsum(self._costs.table.of_microbatch(name, stage, microbatch) for name in COST_LISTS[:3] for stage in stages)

    def _given(self) -> list[Plan]:
        """The base with the data in the order in which it came, and sorted by length both ways."""
        return [self._assigned(self._base, each) for each in (self._came, self._ascending, self._ascending[::-1])]

    def _assigned(self, plan: Plan, assignment: Sequence[int]) -> Plan:
        """A plan with another assignment, and the slices of these microbatches."""
        if self._costs.table.has_slices:
            plan = recut(plan, [self._slices[index] for index in assignment])
        return replace(plan, assignment=tuple(assignment))

    def _order(self, plan: Plan, assignment: Sequence[int]) -> Order:
        order = order_of(split_fused(self._assigned(plan, assignment)))
        return without_wgrad(order) if self._fused else order

    def _orders(self, plan: Plan, assignments: Sequence[Sequence[int]]) -> list[Order]:
        """The order of each assignment: the same of all where no microbatch has slices."""
        if not self._costs.table.has_slices:
            return [self._order(plan, self._came)] * len(assignments)
        return [self._order(plan, each) for each in assignments]

    def _peaks(self, costs: CostModel) -> list[float]:
        return [max(peak_memory(plan, costs)) for plan in self._given()]

    def _make_core(self) -> Core:
        limit = self._limit * min(self._base.num_ranks, self._m)
        is_makespan = self._options.objective is Objective.MAKESPAN
        excess_ms = _EXCESS_ROUNDS * self._bottleneck_ms
        return Core(
            Problem.of(
                self._base.placement,
                self._m,
                self._reserved,
                limit=limit,
                is_makespan=is_makespan,
                fused=self._fused,
                excess_ms=excess_ms,
            )
        )

    def best(self) -> Plan:
        """Score the given orders, anneal from the best starts, and return the best of all."""
        given = self._given()
        for plan, order in zip(given, self._orders(self._base, [each.assignment for each in given]), strict=True):
            objective = self._take(order, plan.assignment)
            if objective == math.inf and max(peak_memory(plan, self._costs)) <= self._limit + MEMORY_TOLERANCE:
                # It fits, but not with the memory that the search reserves at every F (`CostModel.reserved`).
                objective = self._options.objective.of_passes(simulate(plan, self._costs))
                self._found.append(_Found(objective, order, list(plan.assignment)))
        budget = self._options.budget
        starts = [self._start(plan) for plan in self._bases]
        probe = _PROBE_SHARE * budget / len(starts) if len(starts) > 1 else 0.0
        reached = [self._anneal(start, probe, _TEMPERATURES[0]) for start in starts]
        start = starts[min(range(len(starts)), key=lambda index: (reached[index], index))]
        left = budget - probe * len(starts)
        rounds = max(2, min(_MOST_ROUNDS, int(left / _SMALL_ROUND)))
        share = 1.0 / rounds if left <= 4 * _SMALL_ROUND else 0.5 / rounds
        for _ in range(rounds):
            self._anneal(start, share * left, _TEMPERATURES[0])
        if not self._found and not self._fixed:
            self._anneal(self._start(_one_after_the_other(self._base)), 0.5 * left, _TEMPERATURES[0])
        if not self._found:
            raise self._too_little_memory()
        best = min(self._found, key=lambda found: found.objective)
        if share * rounds < 1 and not self._fixed:
            rows = without_wgrad(best.order)
            self._anneal(_Start(0.0, rows, [_PATIENCE] * len(rows), best.assignment), 0.25 * left, _TEMPERATURES[1])
            best = min(self._found, key=lambda found: found.objective)
        if share * rounds < 1:
            start = _Start(0.0, best.order, [math.inf] * len(best.order), best.assignment)
            self._anneal(start, (0.5 if self._fixed else 0.25) * left, _TEMPERATURES[1])
            best = min(self._found, key=lambda found: found.objective)
        return self._plan_of(best)

    def _start(self, plan: Plan) -> _Start:
        """The best of a plan's assignments by rule, with its own Ws or with Ws that fill the bubbles."""
        rising, falling = self._ascending[::2], self._ascending[1::2][::-1]
        has_own = self._fixed or self._fused
        assignments, starts = (rising + falling, self._came, self._ascending, self._ascending[::-1]), []
        orders = [order if has_own else without_wgrad(order) for order in self._orders(plan, assignments)]
        for value in (math.inf,) if has_own else _PATIENCES:
            for assignment, rows in zip(assignments, orders, strict=True):
                patience = [value] * len(rows)
                score = self._core.evaluate_assigned(rows, patience, assignment)[0]
                starts.append(_Start(score, rows, patience, assignment))
        return min(starts, key=lambda start: start.score)

    def _anneal(self, start: _Start, budget: float, temperature: float) -> float:
        """Anneal from a start and keep what is found; its objective, infinite if nothing fits the memory limit."""
        self._seed = (self._seed + 1) & (2**63 - 1)
        order, assignment = self._core.assign(
            start.rows, start.patience, start.assignment, self._seed, budget, temperature * self._bottleneck_ms, self._fixed
        )
        return self._take(order, assignment) if order else math.inf

    def _take(self, order: Order, assignment: Sequence[int]) -> float:
        patience = [math.inf] * len(order)
        filled = self._core.fill_assigned(order, patience, assignment)
        if not filled:
            return math.inf
        objective = self._core.evaluate_assigned(filled, patience, assignment)[1]
        self._found.append(_Found(objective, filled, list(assignment)))
        return objective

    def _plan_of(self, found: _Found) -> Plan:
        own = found.assignment == list(range(self._m))
        order = without_wgrad(found.order) if self._fused else found.order
        if order == self._order(self._base, found.assignment):
            plan = self._assigned(self._base, found.assignment)
        else:
            slices = [self._slices[index] for index in found.assignment]
            plan = plan_of_order(found.order, self._base.schedule, self._base.placement, slices, fused=self._fused)
        return replace(plan, assignment=() if own else tuple(found.assignment))

    def _too_little_memory(self) -> PlanError:
        tried = self._peaks(self._costs)
        return PlanError(
            f"plan {self._base.schedule!r}: no assignment of these {self._m} microbatches was found that fits memory limit "
            f"{self._limit:.6g}; in the order they came it needs {tried[0]:.6g}, sorted {min(tried[1:]):.6g}; "
            "raise the limit, or choose a schedule whose order may change, such as zb or zbv"
        )


def _is_fused(plan: Plan) -> bool:
    kinds = {op.kind for row in plan.ops for op in row}
    if OpKind.BW in kinds and kinds & {OpKind.B, OpKind.W}:
        raise PlanError(f"plan {plan.schedule!r} has fused and split backwards; microbatches are assigned to plans of one kind")
    return OpKind.BW in kinds


def _one_after_the_other(plan: Plan) -> Plan:
    """The order that needs the least memory: each microbatch runs through all stages before the next one begins."""
    rows = []
    for stages in plan.placement.rank_to_stages:
        row = []
        for begin, end in pairwise(plan.passes.starts):
            for kind, some in ((OpKind.F, stages), (OpKind.B, stages[::-1]), (OpKind.W, stages)):
                row += [plan.passes.nth(stage, kind, number) for stage in some for number in range(begin, end)]
        rows.append(tuple(row))
    return plan.with_ops(rows)
