"""Partition, placement and order in one search: the fastest layout of a model's layers, with its plan.

For every placement some good partitions (`partitions`) are planned with little effort, the one with the lowest lower bound first;
those whose bound is above the best plan so far are left out. Then come the neighbors of the best layout, and in the end the best
few layouts get the whole effort. The order of everything is fixed, so the same arguments find the same layout on every machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import Layout, StageCosts
from megatron.zerobubble.plan.partition.partitions import partitions
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import AUTO, Result, enough_memory, make_plan
from megatron.zerobubble.plan.registry import check_at_least_one, check_size, placement_of, schedule_info, schedule_spec
from megatron.zerobubble.plan.search.core import Core
from megatron.zerobubble.plan.search.interface import Problem
from megatron.zerobubble.plan.search.orders import order_of
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions, check_memory_limit

__all__ = ["LayoutResult", "plan_layout", "plan_of_layout"]

_FAMILIES = (("zb", 1), ("zbv", 2), ("zb-interleaved", 2), ("zb-interleaved", 3), ("zb-interleaved", 4), ("zb-w", 4))
_SPLIT = frozenset({"zb", "zbv", "zb-interleaved", "zb-w"})
"""Schedules whose plans are those that the search finds on their placement."""
_CHUNKS = (2, 3, 4)
"""Virtual stages (VPP) per rank to try for an interleaved schedule by name."""
_MOST_PARTITIONS, _SLOWEST = 12, 8.0
"""Partitions of a placement that are planned, and the weight of the slowest stage in their choice."""
_FIRST_SHARE, _SECOND_SHARE = 0.04, 0.25
_SECOND, _THIRD = 6, 2
"""Layouts that are planned with the second share of the budget, and with all of it."""
_MOST_MOVES, _MOST_NEIGHBORS, _ROUNDS, _MOST_PLACEMENTS = 120, 12, 3, 2


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """The best layout found, and its plan."""

    layout: Layout
    stage_costs: StageCosts
    """Its costs in the planner's units."""
    result: Result
    """Its plan, with the lower bound of this layout."""
    num_planned: int
    """Layouts that were planned."""
    num_ruled_out: int
    """Layouts whose lower bound was above the best plan."""

    @property
    def peak_bytes(self) -> list[float]:
        """Per rank, peak activations plus weights, gradients and optimizer state."""
        return self.layout.peak_bytes(self.stage_costs, self.result.simulation.peak_memory)

    def metrics(self) -> dict[str, object]:
        """The `metrics` object of the plan's JSON form, with the bytes of every rank."""
        return self.result.metrics() | {"peak_bytes": self.peak_bytes}


def plan_layout(
    model: Model,
    *,
    num_ranks: int,
    num_microbatches: int,
    memory_bytes: float | None = None,
    schedule: str = AUTO,
    num_chunks: int | None = None,
    options: SearchOptions | None = None,
    allow_empty: bool = True,
) -> LayoutResult:
    """The best layout found for a model, and its plan.

    Args:
        model: layers with their times and bytes.
        num_ranks: pipeline ranks p.
        num_microbatches: microbatches per iteration m.
        memory_bytes: memory of one device; None: no limit.
        schedule: a name of `registry.known_schedules`, or `auto` for the best of all placements.
        num_chunks: virtual stages (VPP) per rank, for interleaved schedules; None: 2, 3 and 4 are tried.
        options: objective, seed and budget; its memory limit is not used.
        allow_empty: whether stages inside the pipeline can be without layers. A hybrid model has none.

    Raises:
        ConfigError: a wrong name or number, a model without times, or one that does not fit the devices.
    """
    check_at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    check_size(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=4)
    if model.total.work_ms <= 0:
        raise ConfigError("no layer takes any time; give the times of at least one kind")
    families = _families(schedule, num_ranks, num_chunks)
    whole = Layout(model=model, placement=Placement.linear(1), per_stage=(model.num_layers,))
    whole.stage_costs(num_microbatches, None)  # refuses times and bytes whose sums are too large for costs
    found = _Joint(model, num_microbatches, memory_bytes, options or SearchOptions(), allow_empty and not model.is_hybrid)
    for name, placement in families:
        found.add(name, placement)
    return found.best()


def plan_of_layout(
    schedule: str, layout: Layout, num_microbatches: int, memory_bytes: float | None, options: SearchOptions
) -> tuple[StageCosts, Result]:
    """The best plan found for one layout.

    Args:
        schedule: a schedule on the layout's placement.
        layout: partition and placement.
        num_microbatches: m.
        memory_bytes: memory of one device; None: no limit.
        options: objective, seed and budget; its memory limit is not used.

    Raises:
        ConfigError: no plan fits the memory.
        PlanError: the schedule's fixed order does not fit the memory.
    """
    stages = layout.stage_costs(num_microbatches, memory_bytes)
    own = replace(options, memory_limit=_enough(layout.placement, num_microbatches, stages, options.objective))
    interleaved = schedule_info(schedule).num_chunks is None
    result = make_plan(
        PlanRequest(
            schedule=schedule,
            num_ranks=layout.placement.num_ranks,
            num_microbatches=num_microbatches,
            stages=stages.costs,
            options=own,
            num_chunks=layout.placement.num_chunks if interleaved else None,
        )
    )
    bound = lower_bound(layout.placement, num_microbatches, stages.costs, stages.memory_limit)
    return stages, replace(result, bound=bound)


def _objective_ms(plan: Plan, costs: CostModel, limit: float | None, objective: Objective) -> float:
    """The iteration time of a plan, by the search's own evaluation, which is faster than a simulation."""
    unit = min(plan.num_ranks, plan.num_microbatches)
    most = math.inf if limit is None else limit * unit
    problem = Problem.of(plan.placement, plan.num_microbatches, costs, limit=most, is_makespan=objective is Objective.MAKESPAN)
    return Core(problem).evaluate(order_of(plan))[1]


def _enough(placement: Placement, num_microbatches: int, stages: StageCosts, objective: Objective) -> float | None:
    """The memory limit to search under; None: any."""
    limit = math.inf if stages.memory_limit is None else stages.memory_limit
    enough = enough_memory(placement, num_microbatches, stages.costs, limit, objective)
    return None if enough == math.inf else enough


def _families(schedule: str, num_ranks: int, num_chunks: int | None) -> list[tuple[str, Placement]]:
    """Schedules with the placements to try."""
    if schedule == AUTO:
        if num_chunks is not None:
            raise ConfigError("auto chooses the number of chunks; drop it or name an interleaved schedule")
        return [(name, placement_of(name, num_ranks=num_ranks, num_chunks=chunks)) for name, chunks in _FAMILIES]
    takes_any = schedule_info(schedule).num_chunks is None and num_chunks is None
    tried: Sequence[int | None] = _CHUNKS if takes_any else (num_chunks,)
    return [(schedule, schedule_spec(schedule, num_ranks=num_ranks, num_chunks=chunks).placement) for chunks in tried]


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A layout with its lower bound, planned or not."""

    schedule: str
    layout: Layout
    bound_ms: float
    time_ms: float = math.inf
    """The iteration time of the best plan so far."""
    found: tuple[StageCosts, Result] | None = None


class _Joint:
    """The state of one search over layouts."""

    def __init__(
        self, model: Model, num_microbatches: int, memory_bytes: float | None, options: SearchOptions, allow_empty: bool
    ) -> None:
        self._model, self._m, self._memory, self._options, self._allow_empty = (
            model,
            num_microbatches,
            memory_bytes,
            options,
            allow_empty,
        )
        self._candidates: list[_Candidate] = []
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._too_large: list[tuple[str, Layout]] = []
        """Schedules with layouts whose ranks cannot even hold one microbatch."""
        self.num_planned = self.num_ruled_out = 0

    def add(self, schedule: str, placement: Placement) -> None:
        """Add partitions of a placement: in turn the next one by its bound, and by its bound and its slowest stage.

        The bound alone prefers partitions whose stages differ much, which no order may run near their bounds.
        """
        counts = partitions(
            self._model, placement, memory_bytes=self._memory, allow_empty=self._allow_empty, seed=self._options.seed
        )
        some = [candidate for one in counts if (candidate := self._candidate(schedule, placement, one)) is not None]
        turns = zip(sorted(some, key=_bound_of), sorted(some, key=_bound_and_slowest), strict=True)
        chosen = {one.layout.per_stage: one for turn in turns for one in turn}
        self._candidates += list(chosen.values())[:_MOST_PARTITIONS]

    def _candidate(self, schedule: str, placement: Placement, counts: tuple[int, ...]) -> _Candidate | None:
        """A layout that fits the memory, once."""
        key = (f"{schedule}{placement.num_stages}", counts)
        if key in self._seen:
            return None
        self._seen.add(key)
        layout = Layout(model=self._model, placement=placement, per_stage=counts)
        try:
            stages = layout.stage_costs(self._m, self._memory)
            check_memory_limit(placement, self._m, stages.costs, stages.memory_limit)
        except ConfigError:
            self._too_large.append((schedule, layout))
            return None
        bound = lower_bound(placement, self._m, stages.costs, stages.memory_limit)
        return _Candidate(schedule=schedule, layout=layout, bound_ms=self._options.objective.of(bound))

    def best(self) -> LayoutResult:
        """Plan the candidates, with more effort for fewer of them."""
        planned = self._improved(self._round(sorted(self._candidates, key=_bound_of), _FIRST_SHARE, is_short=True))
        found: list[_Candidate] = []
        for share, keep in ((_SECOND_SHARE, _SECOND), (1.0, _THIRD)):
            found += self._round(planned[:keep], share, best=min(map(_time_of, found), default=math.inf))
            planned = sorted(found, key=_time_of)
        chosen = next((one for one in planned if one.found is not None), None)
        if chosen is None or chosen.found is None:
            raise self._none_fits()
        stages, result = chosen.found
        return LayoutResult(
            layout=chosen.layout,
            stage_costs=stages,
            result=result,
            num_planned=self.num_planned,
            num_ruled_out=self.num_ruled_out,
        )

    def _none_fits(self) -> ConfigError:
        """What to raise without any plan: the memory of the layout that needs the least, or that there are too few layers."""
        needs = [
            (*self._least_bytes(schedule, layout), schedule, layout)
            for schedule, layout in [*self._too_large, *((one.schedule, one.layout) for one in self._candidates)]
        ]
        if not needs:
            return ConfigError(
                f"{self._model.num_layers} layers are too few for the stages of any placement that was tried, none of which "
                "can be empty; take fewer ranks or stages per rank"
            )
        assert self._memory is not None, "without a limit every layout that was tried has a plan"
        most, rank, schedule, layout = min(needs, key=lambda need: need[0])
        return ConfigError(
            f"no layout that was tried fits devices of {self._memory / 2**30:.2f} GiB: the one that needs the least, {schedule} "
            f'with "{layout.text}", takes {most / 2**30:.2f} GiB or more on rank {rank}; take a schedule with less activation '
            "memory, or more ranks"
        )

    def _least_bytes(self, schedule: str, layout: Layout) -> tuple[float, int]:
        """What the fullest rank holds at least, and the rank: one microbatch, or with a fixed order of ops the order's peak."""
        held = [sum(parts) for parts in zip(layout.ranks("static_bytes"), layout.ranks("activation_bytes"), strict=True)]
        if not schedule_info(schedule).is_searched:
            stages, result = plan_of_layout(schedule, layout, self._m, None, self._options)
            held = layout.peak_bytes(stages, result.simulation.peak_memory)
        return max(held), held.index(max(held))

    def _round(
        self, candidates: Sequence[_Candidate], share: float, *, best: float = math.inf, is_short: bool = False
    ) -> list[_Candidate]:
        """Plan candidates with a share of the budget; the fastest first. Those that cannot beat the best are left out."""
        options = replace(self._options, budget=share * self._options.budget)
        planned: list[_Candidate] = []
        for one in candidates:
            if one.bound_ms >= best * (1 - 1e-9):
                self.num_ruled_out += 1
                continue
            with suppress(PlanError, ConfigError):
                planned.append(self._shortly(one, options) if is_short else self._fully(one, options))
                self.num_planned += 1
                best = min(best, planned[-1].time_ms)
        return sorted(planned, key=_time_of)

    def _fully(self, one: _Candidate, options: SearchOptions) -> _Candidate:
        found = plan_of_layout(one.schedule, one.layout, self._m, self._memory, options)
        return replace(one, found=found, time_ms=options.objective.of(found[1].simulation))

    def _shortly(self, one: _Candidate, options: SearchOptions) -> _Candidate:
        """Without the schedule's own patterns to start from and without a simulation, which take longer than a short search."""
        if one.schedule not in _SPLIT:
            return self._fully(one, options)
        placement, stages = one.layout.placement, one.layout.stage_costs(self._m, self._memory)
        own = replace(options, memory_limit=_enough(placement, self._m, stages, options.objective))
        plan = search(one.schedule, placement, self._m, stages.costs, own)
        return replace(one, time_ms=_objective_ms(plan, stages.costs.reserved, own.memory_limit, options.objective))

    def _improved(self, planned: list[_Candidate]) -> list[_Candidate]:
        """Plan neighbors of the best layout on each of the best placements, while that helps."""
        for placement in list(dict.fromkeys(one.layout.placement for one in planned))[:_MOST_PLACEMENTS]:
            own = [one for one in planned if one.layout.placement == placement]
            for number in range(_ROUNDS):
                before = own[0].time_ms
                near = sorted(self._neighbors(own[0], Random(number)), key=_bound_of)[:_MOST_NEIGHBORS]
                found = self._round(near, _FIRST_SHARE, best=before, is_short=True)
                own, planned = sorted(own + found, key=_time_of), planned + found
                if own[0].time_ms >= before * (1 - 1e-6):
                    break
        return sorted(planned, key=_time_of)

    def _neighbors(self, one: _Candidate, random: Random) -> Iterator[_Candidate]:
        """Layouts with one layer moved from one stage to another, and no more work on the bottleneck rank; some of them."""
        placement, counts = one.layout.placement, one.layout.per_stage
        last = placement.num_stages - 1
        moves = list(itertools.permutations(range(placement.num_stages), 2))
        random.shuffle(moves)
        left = _MOST_MOVES
        for source, target in moves:
            if counts[source] <= int(not self._allow_empty and 0 < source < last):
                continue
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            near = Layout(model=self._model, placement=placement, per_stage=tuple(moved))
            if near.bottleneck_ms > one.layout.bottleneck_ms * (1 + 1e-9):
                continue
            candidate = self._candidate(one.schedule, placement, near.per_stage)
            if candidate is not None:
                yield candidate
                left -= 1
            if left == 0:
                return


def _time_of(candidate: _Candidate) -> float:
    return candidate.time_ms


def _bound_and_slowest(candidate: _Candidate) -> tuple[float, tuple[int, ...]]:
    layout = candidate.layout
    passes = zip(*(layout.stages(name) for name in ("forward_ms", "backward_ms", "wgrad_ms")), strict=True)
    return candidate.bound_ms + _SLOWEST * max(map(math.fsum, passes)), layout.per_stage


def _bound_of(candidate: _Candidate) -> tuple[float, str, tuple[int, ...]]:
    return candidate.bound_ms, candidate.schedule, candidate.layout.per_stage
