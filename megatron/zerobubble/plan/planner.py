"""The planner's front: a schedule's name, or `auto`, to a plan with its simulation and its bound.

`auto` asks every family for its best plan within the limit and returns the best of all: first each with a small share of the
budget, then the leader, if it is searched for, with the rest. Interleaved 1F1B, which most people run, is among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bound import Bound, lower_bound
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan, check_at_least_one, check_num_chunks, schedule_info
from megatron.zerobubble.plan.search import Goal, Objective, smallest_memory
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

    @property
    def name(self) -> str:
        """The plan's schedule."""
        return self.simulation.plan.schedule

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
    return Result(simulation, lower_bound(plan.placement, num_microbatches, costs, limit))


def _auto(num_ranks: int, num_microbatches: int, costs_of: CostsOf, goal: Goal) -> Result:
    if goal.memory_limit is None:
        goal = replace(goal, memory_limit=math.inf)
    results: list[tuple[str, int, Result]] = []
    least: list[float] = []
    share = replace(goal, budget=_FIRST_SHARE * goal.budget)
    for name, num_chunks in _FAMILIES:
        try:
            placement = placement_of(name, num_ranks, num_chunks)
            least.append(smallest_memory(placement, num_microbatches, costs_of(placement)))
            results.append((name, num_chunks, _one(name, num_ranks, num_microbatches, num_chunks, costs_of, share)))
        except (PlanError, ConfigError):
            # This family has no plan within the limit, or the costs are for another placement; another family may have one.
            continue
    if not results:
        if not least:
            raise PlanError("the costs fit no placement: give one value a rank (linear) or two (V, interleaved)")
        raise ConfigError(f"no schedule keeps memory limit {goal.memory_limit}: the smallest that works is {min(least):.6g}")
    name, num_chunks, best = min(results, key=lambda entry: entry[2].objective_ms(goal.objective))
    if name in _SEARCHED and goal.budget > 0:
        rest = replace(goal, budget=(1 - _FIRST_SHARE * len(_SEARCHED)) * goal.budget)
        longer = _one(name, num_ranks, num_microbatches, num_chunks, costs_of, rest)
        best = min((best, longer), key=lambda result: result.objective_ms(goal.objective))
    bounds = [result.bound for _, _, result in results]
    bound = min(bounds, key=lambda bound: bound.span_ms)
    return Result(best.simulation, replace(bound, makespan_ms=min(bound.makespan_ms for bound in bounds)))
