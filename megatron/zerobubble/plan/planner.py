"""The planner's front: a schedule's name, or `auto`, to a plan with its simulation and its bound.

`auto` asks every family for its best plan within the limit and returns the best of all: first each with a small share of the
budget, except those whose bound says that they cannot win; then the leader, if it is searched for, with the rest. Interleaved
1F1B, which most people run, is among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bound import Bound, lower_bound
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan, check_at_least_one, check_num_chunks, schedule_info
from megatron.zerobubble.plan.search import Goal, Objective, check_memory_limit, smallest_memory
from megatron.zerobubble.plan.simulate import Simulation, simulate

AUTO = "auto"
"""The name that leaves the choice to the planner."""

CostsOf = Callable[[Placement], CostModel]
"""Costs for a placement; raises PlanError where there are none for it."""

_FAMILIES = (
    ("1f1b", 1),
    ("interleaved-1f1b", 2),
    ("interleaved-1f1b", 4),
    ("1f1b-v", 2),
    ("zb", 1),
    ("zb-interleaved", 2),
    ("zbv", 2),
)
_SEARCHED = frozenset({"zb", "zb-interleaved", "zbv"})
_FIRST_SHARE = 0.1


@dataclass(frozen=True)
class Result:
    """A plan and how good it is."""

    simulation: Simulation
    bound: Bound
    """Under the limit asked for; where none was, under the plan's own peak memory. For `auto`: over all placements tried."""
    num_chunks: int = 1
    """Stages a rank."""
    runner_up: Result | None = None
    """For `auto`: the best of the other schedules that were tried; None where the bound of each said that it cannot be better."""

    @property
    def name(self) -> str:
        """The plan's schedule."""
        return self.simulation.plan.schedule

    def verdict(self, objective: Objective) -> str:
        """For `auto`, in a line: what is taken, and by how much the next best schedule is slower."""
        mine = self.objective_ms(objective)
        told = f"auto takes {self._title()}, {objective.value} {mine:.3f} ms"
        if self.runner_up is None:
            return f"{told}; the lower bounds of all others are above it"
        second = self.runner_up.objective_ms(objective)
        return f"{told}; runner-up {self.runner_up._title()}, {second:.3f} ms ({100 * (second / mine - 1):.1f} % more)"

    def _title(self) -> str:
        chunks = "" if self.num_chunks == 1 else f" with {self.num_chunks} stages a rank"
        return f"{self.name}{chunks}"

    def objective_ms(self, objective: Objective) -> float:
        """Span or makespan."""
        return self.simulation.span_ms if objective is Objective.SPAN else self.simulation.makespan_ms

    def metrics(self) -> dict[str, object]:
        """The `metrics` of the JSON form, with bounds and gaps."""
        return self.simulation.metrics() | {
            "bound_span_ms": self.bound.span_ms,
            "bound_makespan_ms": self.bound.makespan_ms,
            "bound_bubble_rate": self.bound.bubble_rate,
            "span_gap": self.bound.gap(self.simulation.span_ms),
            "makespan_gap": self.bound.makespan_gap(self.simulation.makespan_ms),
        }


def placement_of(name: str, num_ranks: int, num_chunks: int | None = None) -> Placement:
    """The placement of a schedule."""
    info = schedule_info(name)
    if info.placement == "V":
        return Placement.v(num_ranks)
    return Placement.loop(num_ranks, info.default_num_chunks if num_chunks is None else num_chunks)


def make_plan(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    costs_of: CostsOf,
    goal: Goal,
    num_chunks: int | None = None,
    max_pending_backward: int | None = None,
) -> Result:
    """The best plan found of one schedule, or with `auto` of all.

    Raises:
        ConfigError: a wrong name or number, or a memory limit that no plan keeps (names the smallest that works).
        PlanError: a fixed order that breaks the limit, or costs for another number of stages.
    """
    check_at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if name == AUTO:
        if num_chunks is not None or max_pending_backward is not None:
            raise ConfigError("auto chooses the number of chunks and of pending microbatches; drop them or name a schedule")
        return _auto(num_ranks, num_microbatches, costs_of, goal)
    return _one(name, num_ranks, num_microbatches, num_chunks, costs_of, goal, max_pending_backward)


def _one(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None,
    costs_of: CostsOf,
    goal: Goal,
    max_pending_backward: int | None = None,
) -> Result:
    check_num_chunks(schedule_info(name), num_chunks)
    costs = costs_of(placement_of(name, num_ranks, num_chunks))
    plan = build_plan(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        max_pending_backward=max_pending_backward,
        costs=costs,
        goal=goal,
    )
    simulation = simulate(plan, costs)
    limit = max(simulation.peak_memory) if goal.memory_limit is None else goal.memory_limit
    return Result(simulation, lower_bound(plan.placement, num_microbatches, costs, limit), plan.placement.num_chunks)


def _auto(num_ranks: int, num_microbatches: int, costs_of: CostsOf, goal: Goal) -> Result:
    if goal.memory_limit is None:
        goal = replace(goal, memory_limit=math.inf)
    families, least = _feasible(num_ranks, num_microbatches, costs_of, goal)
    if not families:
        if not least:
            raise PlanError("the costs fit no placement: give one value a rank (linear) or two (V, interleaved)")
        raise ConfigError(f"no schedule keeps memory limit {goal.memory_limit}: the smallest that works is {min(least):.6g}")
    share, left = replace(goal, budget=_FIRST_SHARE * goal.budget), 1.0
    best: tuple[_Family, Result] | None = None
    tried: list[Result] = []
    for family in families:
        if best is not None and family.bound_ms(goal.objective) >= best[1].objective_ms(goal.objective) * (1 - 1e-9):
            continue  # it has nothing better
        try:
            result = _one(family.name, num_ranks, num_microbatches, family.num_chunks, costs_of, share)
        except PlanError:
            continue  # its one order does not keep the limit
        left -= _FIRST_SHARE * (family.name in _SEARCHED)
        tried.append(result)
        if best is None or result.objective_ms(goal.objective) < best[1].objective_ms(goal.objective):
            best = family, result
    if best is None:
        raise ConfigError(f"no schedule keeps memory limit {goal.memory_limit}: the smallest that works is {min(least):.6g}")
    family, result = best
    others = [other for other in tried if other is not result]
    if family.name in _SEARCHED and goal.budget > 0:
        rest = replace(goal, budget=left * goal.budget)
        longer = _one(family.name, num_ranks, num_microbatches, family.num_chunks, costs_of, rest)
        result = min((result, longer), key=lambda result: result.objective_ms(goal.objective))
    bound = min((family.bound for family in families), key=lambda bound: bound.span_ms)
    return replace(
        result,
        bound=replace(bound, makespan_ms=min(family.bound.makespan_ms for family in families)),
        runner_up=min(others, key=lambda other: other.objective_ms(goal.objective), default=None),
    )


class _Family(NamedTuple):
    """A schedule that `auto` may choose."""

    name: str
    num_chunks: int
    bound: Bound
    """Of its placement under the limit."""

    def bound_ms(self, objective: Objective) -> float:
        """Of span or makespan."""
        return self.bound.span_ms if objective is Objective.SPAN else self.bound.makespan_ms


def _feasible(num_ranks: int, num_microbatches: int, costs_of: CostsOf, goal: Goal) -> tuple[list[_Family], list[float]]:
    """Families that the costs are for and the limit allows, by ascending bound; and the smallest limits of those first ones."""
    families, least = [], []
    for name, num_chunks in _FAMILIES:
        try:
            placement = placement_of(name, num_ranks, num_chunks)
            costs = costs_of(placement)
            least.append(smallest_memory(placement, num_microbatches, costs))
            check_memory_limit(placement, num_microbatches, costs, goal.memory_limit)
        except (PlanError, ConfigError):
            continue  # costs for another placement, or not enough memory for any order on this one
        families.append(_Family(name, num_chunks, lower_bound(placement, num_microbatches, costs, goal.memory_limit)))
    return sorted(families, key=lambda family: family.bound_ms(goal.objective)), least
