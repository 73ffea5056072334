"""From a request, of one schedule or of `auto`, to a plan with its simulation and its lower bound. `anytime` is the front door.

`auto` plans every schedule family within the memory limit and returns the best plan of all: first each family with a small share
of the budget, and with its hand-written orders alone where the lower bound shows that it cannot win; then the leader and all
families close to it as if each was asked for by name, so that their plans are not better. `auto` mostly spends one to two times
its budget, at most 4.3 times. The families include interleaved 1F1B. `best_of` says which of equally fast plans is the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bounds.schedule_bound import Bound, lower_bound
from megatron.zerobubble.plan.communication import num_crossings, num_messages
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.pairing import with_pairs
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.registry import check_at_least_one, check_size, plan_of, plans_of, schedule_info, schedule_spec
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.assign import check_sliceable
from megatron.zerobubble.plan.search.search_options import (
    SearchOptions,
    check_memory_limit,
    largest_microbatch,
    smallest_memory,
)
from megatron.zerobubble.plan.simulate import Simulation, simulate
from megatron.zerobubble.plan.transforms import executed_plan

AUTO = "auto"
"""The schedule name with which the planner chooses the schedule."""

AUTO_MEMORY_LIMIT = 1.0
"""Memory limit of `auto` where none is given: 1F1B's activation memory on rank 0."""

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
_WORTH = 0.99
"""Most of the iteration time of the best plan that a schedule above the memory limit takes, if it is worth a line."""
_LITTLE_W = 0.5
"""Of F. Below it a zero-bubble schedule has little to fill the bubble with."""
ROUNDING = 1e-9
"""Share of an iteration time below which a difference is rounding."""
_TIE = 3 * ROUNDING
"""Share of the iteration time that each further slice has to save: of equally good plans the one of fewer slices is chosen."""
_CLOSE = 0.05
"""A schedule that is slower than the best by less than this share after the first round may still win."""
_ENOUGH_FOR_V = 1.5
"""Memory limit for searches on the V and W placements, as a multiple of p microbatches on the fullest rank, if a
larger one does not lower the bound: under a looser limit the search wanders among orders that only use more memory. In rows 13
and 14 of the published times (docs/benchmarks/planner.md) the V found with 1.5 is better than anything found with 2.0."""


@dataclass(frozen=True)
class Result:
    """A plan with its simulation and its lower bound; for `auto` also with the runner-up."""

    simulation: Simulation
    bound: Bound
    """Lower bound under the requested memory limit, or else under the plan's own peak memory. For `auto`: over all placements."""
    runner_up: Result | None = None
    """For `auto`: the fastest of the schedules that are slower than the chosen one; None if there is none."""
    equal: tuple[Result, ...] = ()
    """For `auto`: other schedules that take the same time, see `best_of`."""
    above_limit: Simulation | None = None
    """For `auto`: 1F1B or interleaved 1F1B, if it is faster by 1 % or more and only the memory limit rules it out."""

    @staticmethod
    def of(plan: Plan, costs: CostModel, memory_limit: float | None = None) -> Result:
        """A plan as it runs under its costs, and the lower bound under a memory limit; None: under the plan's own peak memory."""
        simulation = simulate(plan if costs.step is None else executed_plan(costs.step, plan), costs)
        limit = max(simulation.peak_memory) if memory_limit is None else memory_limit
        return Result(simulation, lower_bound(plan.placement, plan.num_microbatches, simulation.costs, limit))

    @property
    def name(self) -> str:
        """The name of the plan's schedule."""
        return self.simulation.plan.schedule

    @property
    def num_chunks(self) -> int:
        """Virtual stages (VPP) per rank."""
        return self.simulation.plan.placement.num_chunks

    @property
    def num_slices(self) -> int:
        """Slices of each microbatch."""
        return self.simulation.plan.num_slices

    def time_ms(self, objective: Objective) -> float:
        """The iteration time by which plans are compared, see `_TIE`."""
        return objective.of(self.simulation) * (1 + _TIE * (self.num_slices - 1))

    def verdict(self, objective: Objective) -> str:
        """For `auto`, one line: the chosen schedule, its iteration time, and by how much the runner-up is slower."""
        mine = objective.of(self.simulation)
        parts = [f"auto chose {self.titled(self.name)}: {mine:.3f} ms per iteration {objective.label}"]
        if self.equal:
            parts.append("equal: " + ", ".join(each.titled(each.name) + self._difference(each) for each in self.equal))
        if self.runner_up is not None:
            second = objective.of(self.runner_up.simulation)
            other = self.runner_up.titled(self.runner_up.name)
            parts.append(f"runner-up {other}: {second:.3f} ms ({100 * (second / mine - 1):.1f} % slower)")
        if self.above_limit is not None:
            parts.append(above_limit_text(self.above_limit, mine, objective))
        return "; ".join(parts)

    def _difference(self, other: Result) -> str:
        """What an equally fast plan has more of than this one, in parentheses."""
        mine, theirs = num_messages(self.simulation.plan), num_messages(other.simulation.plan)
        return f" ({theirs} messages, not {mine})" if theirs != mine else " (as many messages)"

    def titled(self, name: str) -> str:
        """A name of the schedule, with the virtual stages and the slices of its plan."""
        titled = _with_chunks(name, self.num_chunks)
        return titled if self.num_slices == 1 else f"{titled} in {self.num_slices} slices per microbatch"

    def metrics(self) -> dict[str, object]:
        """The `metrics` object of the plan's JSON form, with lower bounds and gaps."""
        return self.simulation.metrics() | {
            "bound_span_ms": self.bound.span_ms,
            "bound_makespan_ms": self.bound.makespan_ms,
            "bound_bubble_rate": self.bound.bubble_rate,
            "span_gap": self.bound.gap(self.simulation.span_ms),
            "makespan_gap": self.bound.makespan_gap(self.simulation.makespan_ms),
        }


def make_plan(request: PlanRequest) -> Result:
    """The best plan found for one schedule, or with `auto` for all of them, over the given numbers of slices.

    A search gets the budget of the request's options, which numbers of slices share. Its effort does not count: see `anytime`.

    Raises:
        ConfigError: a wrong name or number, slices under unequal links, or a memory limit that no plan fits (the message names
            the smallest that works).
        PlanError: a hand-written pattern that exceeds the limit, or costs for another number of stages.
    """
    slices = sorted(set(request.num_slices)) or [1]
    check_at_least_one(num_ranks=request.num_ranks, num_microbatches=request.num_microbatches, num_slices=slices[0])
    check_size(num_ranks=request.num_ranks, num_microbatches=request.num_microbatches * slices[-1])
    if request.schedule == AUTO:
        if request.num_chunks is not None or request.max_pending_backward is not None:
            raise ConfigError("auto chooses the number of chunks and of pending microbatches; drop them or name a schedule")
        return _auto(request, slices)
    request.spec(slices[-1])  # refuses what the schedule does not take
    own = replace(request.options, budget=request.options.budget / len(slices))
    found = [_one(request.spec(n), request, own) for n in slices]
    return min(found, key=lambda result: result.time_ms(request.objective))


def best_of(results: Iterable[Result], objective: Objective) -> Result:
    """The fastest plan; of equals that with the fewest messages, then the least memory, then the least other time."""
    results = list(results)
    least = min(result.time_ms(objective) for result in results)
    equal = [result for result in results if result.time_ms(objective) <= least * (1 + ROUNDING)]

    def preference(result: Result) -> tuple[int, float, float]:
        simulation = result.simulation
        both = simulation.span_ms + simulation.makespan_ms
        return num_messages(simulation.plan), round(max(simulation.peak_memory), 6), both

    return min(equal, key=preference)


def _one(spec: ScheduleSpec, request: PlanRequest, options: SearchOptions) -> Result:
    num_microbatches, costs = request.num_microbatches, _costs_of(spec, request)
    check_sliceable(spec.num_slices, costs)
    if costs.is_plain:
        plans = plans_of(spec, num_microbatches, costs=costs, options=options)
    else:
        half = replace(options, budget=0.5 * options.budget)  # for the order of equal microbatches, and again for these ones
        plans = [MicrobatchPlanner(spec, num_microbatches, costs=costs, options=half, base_options=half).plan(costs)]
    plans = [with_pairs(plan, costs, options.objective, options.memory_limit) for plan in plans]
    results = [Result.of(plan, costs, options.memory_limit) for plan in plans]
    return min(results, key=lambda result: result.time_ms(options.objective))


def _costs_of(spec: ScheduleSpec, request: PlanRequest) -> CostModel:
    return request.costs_of(spec.placement, spec.num_slices)


def _auto(request: PlanRequest, num_slices: Sequence[int]) -> Result:
    options = request.options
    most = math.inf if options.memory_limit is None else options.memory_limit
    options = replace(options, memory_limit=most)
    families, least = _feasible(request, num_slices, options)
    whole_share = 1.0 / len(num_slices)  # as for a schedule by name
    if not families:
        if not least:
            raise PlanError("the costs fit no placement: give one value per rank (linear) or two (V, interleaved)")
        raise _too_little_memory(options, least)

    def search(family: _Family, share: float, limit: float) -> Result:
        own = replace(options, budget=share * options.budget, memory_limit=limit)
        return _one(family.spec, request, own)

    def time_of(found: tuple[_Family, Result]) -> float:
        return found[1].time_ms(options.objective)

    tried: list[tuple[_Family, Result]] = []
    for family in families:
        may_win = not tried or family.may_win(min(tried, key=time_of), math.inf, options.objective)
        with suppress(PlanError):  # its hand-written pattern exceeds the limit
            tried.append((family, search(family, _FIRST_SHARE * whole_share if may_win else 0.0, family.limit)))
    if not tried:
        raise _too_little_memory(options, least)
    tried.sort(key=time_of)
    close = [found for found in tried if time_of(found) <= (1 + _CLOSE) * time_of(tried[0])]
    for place, (family, _) in enumerate(close):
        for limit in sorted({family.limit, most}):
            best, own = min(tried[: place + 1], key=time_of), time_of(tried[place])
            if family.spec.name in _SEARCHED and options.budget > 0 and family.may_win(best, own, options.objective):
                tried[place] = min(tried[place], (family, search(family, whole_share, limit)), key=time_of)
    results = [result for _, result in sorted(tried, key=time_of)]
    chosen = best_of(results, options.objective)
    best_ms = chosen.time_ms(options.objective)
    others = [result for result in results if result is not chosen]
    slower = [result for result in others if result.time_ms(options.objective) > best_ms * (1 + 2 * ROUNDING)]
    return replace(
        chosen,
        bound=Bound.of_any([family.bound for family in families]),
        runner_up=slower[0] if slower else None,
        equal=tuple(result for result in others if result not in slower),
        above_limit=_above_limit(request, options, best_ms),
    )


def above_limit_text(faster: Simulation, than_ms: float, objective: Objective) -> str:
    """What 1F1B or interleaved 1F1B would take with more memory, and with long sequences why, as the end of a line.

    Args:
        faster: of 1F1B or interleaved 1F1B.
        than_ms: the iteration time of the plan within the limit.
        objective: which iteration time.
    """
    ms, costs = objective.of(faster), faster.costs
    name = _with_chunks(faster.plan.schedule, faster.plan.placement.num_chunks)
    share = math.fsum(costs.wgrad_ms) / math.fsum(costs.forward_ms)
    why = f"; W takes {share:.2f} of F, and fills little (long sequences: attention has no W)" if share < _LITTLE_W else ""
    return (
        f"with {max(faster.peak_memory):.2f} of 1F1B's activation memory {name} takes {ms:.3f} ms "
        f"({100 * (1 - ms / than_ms):.1f} % less){why}"
    )


def _with_chunks(name: str, num_chunks: int) -> str:
    return name if num_chunks == 1 else f"{name} with {num_chunks} virtual stages (VPP) per rank"


def _above_limit(request: PlanRequest, options: SearchOptions, best_ms: float) -> Simulation | None:
    """The fastest of megatron-core's orders above the memory limit, if it is faster than the best within it by 1 % or more.

    With a limit below 1F1B's memory only 1F1B: that less memory costs time is known, not that the time is above 1F1B's.
    """
    assert options.memory_limit is not None
    found, enough = None, _WORTH * best_ms
    for name, num_chunks in _FAMILIES[:3] if options.memory_limit >= AUTO_MEMORY_LIMIT else _FAMILIES[:1]:
        with suppress(PlanError, ConfigError):  # costs for another placement
            spec = schedule_spec(name, num_ranks=request.num_ranks, num_chunks=num_chunks)
            costs, num_microbatches = _costs_of(spec, request), request.num_microbatches
            if not costs.is_plain or options.objective.of(lower_bound(spec.placement, num_microbatches, costs)) > enough:
                continue
            simulation = simulate(plan_of(spec, num_microbatches), costs)
            if max(simulation.peak_memory) > options.memory_limit and options.objective.of(simulation) <= enough:
                found, enough = simulation, options.objective.of(simulation)
    return found


class _Least(NamedTuple):
    """The smallest memory limit that works for a placement."""

    memory: float
    too_large: str
    """The microbatch that the requested limit is too small for, if they are unequal."""


def _too_little_memory(options: SearchOptions, least: Sequence[_Least]) -> ConfigError:
    memory, too_large = min(least)
    return ConfigError(
        f"no schedule fits memory limit {options.memory_limit:g}{too_large}: the smallest that works is "
        f"{math.ceil(memory * 1e6) / 1e6}"
    )


class _Family(NamedTuple):
    """A schedule that `auto` may choose."""

    spec: ScheduleSpec
    limit: float
    """Memory limit: the requested one, or a lower one under which the bound is the same."""
    bound: Bound
    """Lower bound of its placement under `limit`, no higher than under the requested one."""

    def may_win(self, best: tuple[_Family, Result], own_ms: float, objective: Objective) -> bool:
        """Whether its lower bound is below the best time found, or equal to it, with no more messages, and its own time above."""
        bound, best_ms = self.bound_ms(objective), best[1].time_ms(objective)
        ties = bound <= best_ms * (1 + ROUNDING) < own_ms and self.num_messages <= best[0].num_messages
        return ties or bound < best_ms * (1 - ROUNDING)

    @property
    def num_messages(self) -> int:
        """Activations that are sent per microbatch."""
        return num_crossings(self.spec.placement) * self.spec.num_slices

    def bound_ms(self, objective: Objective) -> float:
        """The lower bound by which families are compared, see `_TIE`."""
        return objective.of(self.bound) * (1 + _TIE * (self.spec.num_slices - 1))


def _feasible(request: PlanRequest, num_slices: Sequence[int], options: SearchOptions) -> tuple[list[_Family], list[_Least]]:
    """The families that the memory limit allows, by ascending bound, and the smallest limit of each family with costs."""
    assert options.memory_limit is not None
    families, least, limit = list[_Family](), list[_Least](), options.memory_limit
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    for n, (name, num_chunks) in itertools.product(num_slices, _FAMILIES):
        if n > 1 and not schedule_info(name).takes_slices:
            continue
        spec = schedule_spec(name, num_ranks=num_ranks, num_chunks=num_chunks, num_slices=n)
        placement = spec.placement
        try:
            costs = _costs_of(spec, request)
        except (PlanError, ConfigError):
            continue  # costs for another placement
        check_sliceable(n, costs)
        try:
            smallest = smallest_memory(placement, num_microbatches, costs)
            least.append(_Least(smallest, largest_microbatch(placement, costs, limit / smallest) if limit < smallest else ""))
            check_memory_limit(placement, num_microbatches, costs, limit)
        except (PlanError, ConfigError):
            continue  # costs of another size, or not enough memory for any order on this placement
        enough = enough_memory(placement, num_microbatches, costs, limit, options.objective) if name in _SEARCHED else limit
        families.append(_Family(spec, enough, lower_bound(placement, num_microbatches, costs, enough)))
    return sorted(families, key=lambda family: family.bound_ms(options.objective)), least


def enough_memory(placement: Placement, num_microbatches: int, costs: CostModel, limit: float, objective: Objective) -> float:
    """The memory limit to search under: on V and W the memory that most likely suffices, if the bound stays the same with it."""
    smallest = smallest_memory(placement, num_microbatches, costs) * min(placement.num_ranks, num_microbatches)
    enough = min(limit, _ENOUGH_FOR_V * smallest)
    if placement.name not in ("V", "W") or enough == limit:
        return limit
    bounds = [objective.of(lower_bound(placement, num_microbatches, costs, each)) for each in (enough, limit)]
    return enough if bounds[0] <= bounds[1] * (1 + 1e-9) else limit
