"""Planning from what the run itself measures.

A window of iterations is timed. When it is over, rank 0 of the world plans for the measured times, all ranks get its plan and
validate it, and the next iteration runs it. Only the order of ops changes, never what they compute.

The plan is looked for by one rank, not by all: times differ from rank to rank in the last digit, and two ranks with different
plans would wait for each other for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.registry import executed_plan, initial_plan, plan_of
from megatron.zerobubble.plan.search.core import PythonCore
from megatron.zerobubble.plan.search.search import SearchOptions, best_core
from megatron.zerobubble.plan.simulate import Simulation, peak_memory, simulate
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE, validate
from megatron.zerobubble.profiling.profile import RankProfile, combine, costs_within, unit_bytes
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.profiling.report import RankMemory

__all__ = ["Measured", "Replanner", "Window", "budget_of", "measured_costs"]

_log = logging.getLogger(__name__)

_COMPILED_EVALUATIONS_PER_S = 8e7
_PYTHON_EVALUATIONS_PER_S = 1.5e6
"""What one core of 2024 does. A budget counts evaluations, so the same measurement gives the same plan on any machine."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which iterations are timed. They are counted from 1, from the start of the job."""

    start: int
    """The first one."""
    end: int
    """The last one; a new plan runs from the next one on."""
    interval: int | None = None
    """A window of the same length ends so many iterations after the last one; None: there is only one window."""

    def holds(self, iteration: int) -> bool:
        """Whether the passes of this iteration are timed."""
        return self.start <= self._folded(iteration) <= self.end

    def ends(self, iteration: int) -> bool:
        """Whether a new plan is made after this iteration."""
        return self._folded(iteration) == self.end

    def _folded(self, iteration: int) -> int:
        if self.interval is None or iteration <= self.end:
            return iteration
        return self.end - (self.end - iteration) % self.interval


def budget_of(seconds: float) -> float:
    """Op evaluations that take about so long here."""
    compiled = best_core() is not PythonCore
    return seconds * (_COMPILED_EVALUATIONS_PER_S if compiled else _PYTHON_EVALUATIONS_PER_S)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank of the world brings to planning."""

    profile: RankProfile
    """Its passes."""
    link_ms: tuple[float, ...]
    """The links that leave it."""
    state_bytes: int = 0
    """Weights, gradients and optimizer state."""
    room_bytes: int = 0
    """What its activations may take; meaningless where there is no limit in bytes."""

    def gathered(self) -> list[Measured]:
        """What all ranks of the world bring, on every rank; all of them must call this."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self)
        return everybody


def measured_costs(everybody: Sequence[Measured], placement: Placement) -> CostModel:
    """The costs of the pipeline that was measured; `placement` is its own."""
    links = [elapsed for each in everybody for elapsed in each.link_ms]
    return combine([each.profile for each in everybody], placement, link_ms=links)


class Replanner:
    """Times windows of iterations and gives the schedule better plans. Every rank of the world needs one and calls it alike.

    Args:
        schedule: whose iterations are timed, and who runs the plans.
        window: when.
        options: objective, seed and budget of a search. The memory limit is the spec's, or follows from `room`.
        num_microbatches: what most iterations will have. Searches for other numbers, on the way there, get a tenth of the budget.
        room: called on every rank at the end of a window: bytes that its activations may take, after what was measured. They are
            then the limit, rank by rank.
        state: bytes of weights, gradients and optimizer state on this rank; asked at the end of a window.
        keep: called on rank 0 of the world with every plan that is found, simulated with the measured costs, if given.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        window: Window,
        options: SearchOptions,
        *,
        num_microbatches: int,
        room: Callable[[RankProfile], int] | None = None,
        state: Callable[[], int] = int,
        keep: Callable[[Simulation], None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._window = window
        self._options = options
        self._usual = num_microbatches
        self._room, self._state = room, state
        self._unit = 0.0
        self._rooms: tuple[float, ...] | None = None
        self._keep = keep
        self._profiler: Profiler | None = None
        self._measured_with: int | None = None
        self._costs: CostModel | None = None
        self._current: dict[int, Plan] = {}
        self.memory: tuple[RankMemory, ...] | None = None
        """What the ranks of the pipeline held in the last window, against what its plan said; None where it was not counted."""

    @property
    def costs(self) -> CostModel | None:
        """What was measured last; None before the first window is over."""
        return self._costs

    def before(self, iteration: int, num_microbatches: int) -> None:
        """The iteration is about to run, with so many microbatches."""
        if self._profiler is None and self._window.holds(iteration):
            self._profiler = Profiler(self._schedule.device)
            self._measured_with = num_microbatches
        self._schedule.hooks.profiler = self._profiler

    def is_due(self, iteration: int) -> bool:
        """Whether `after` will plan. Nothing may be under way between ranks then."""
        return self._window.ends(iteration)

    def after(self, iteration: int, num_microbatches: int) -> None:
        """The iteration has run. At the end of a window: measure the links, plan, and give the schedule the plan.

        For other numbers of microbatches than this one the schedule asks when it comes to them.
        """
        if not self._window.ends(iteration):
            return
        assert self._profiler is not None
        link_ms = self._schedule.link_times()
        profile = self._profiler.profile()
        self._profiler = self._schedule.hooks.profiler = None
        own = Measured(
            profile=profile,
            link_ms=tuple(link_ms.values()),
            state_bytes=self._state(),
            room_bytes=0 if self._room is None else self._room(profile),
        )
        everybody, placement = own.gathered(), self._schedule.spec.placement
        self._costs = measured_costs(everybody, placement)
        self._unit, self._rooms = unit_bytes([each.profile for each in everybody], placement), None
        members = [[each for each in everybody if stages[0] in each.profile.memory] for stages in placement.rank_to_stages]
        if self._room is not None:
            self._rooms = tuple(min(each.room_bytes for each in ranks) / self._unit for ranks in members)
        self.memory = None
        if self._measured_with == num_microbatches and all(members):
            self.memory = self._memory(self._schedule.plan(num_microbatches), members)
        self._schedule.replan(self._planned)
        self._schedule.plan(num_microbatches)

    def _memory(self, plan: Plan, members: Sequence[Sequence[Measured]]) -> tuple[RankMemory, ...]:
        """What was held in the iteration that ran `plan`, per pipeline rank: of its members the most."""
        assert self._costs is not None
        unit = self._unit * min(plan.num_ranks, plan.num_microbatches)
        return tuple(
            RankMemory(
                predicted_bytes=round(predicted * unit),
                measured_bytes=max(each.profile.peak_bytes for each in ranks),
                workspace_bytes=max(each.profile.workspace_bytes for each in ranks),
                state_bytes=max(each.state_bytes for each in ranks),
            )
            for predicted, ranks in zip(peak_memory(plan, self._costs), members, strict=True)
        )

    def _planned(self, num_microbatches: int) -> Plan:
        """A plan for the measured costs, the same on all ranks; all of them must call this at the same point."""
        answer: list[Any] = [self._search(num_microbatches).to_json() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(answer, src=0)
        plan = Plan.from_json(answer[0])
        validate(plan)
        self._current[num_microbatches] = plan
        return plan

    def _search(self, num_microbatches: int) -> Plan:
        """The best of the order so far and what is found; says what it promises."""
        assert self._costs is not None
        begin = time.perf_counter()
        spec, costs, objective = self._schedule.spec, self._costs, self._options.objective
        so_far = executed_plan(spec, self._current.get(num_microbatches) or initial_plan(spec, num_microbatches))
        plan = so_far
        try:
            plan = self._better(so_far, num_microbatches)
        except ConfigError as error:
            _log.warning("the order of ops stays as it was: %s", error)
        before, now = simulate(so_far, costs), simulate(plan, costs)
        _log.info(
            "planned for measured times in %.1f s: %s; %.1f ms an iteration expected "
            "with the order so far (bubble %.1f%%), %.1f ms from now on (%.1f%%), at most %s of activations on a rank",
            time.perf_counter() - begin,
            costs.times_text,
            objective.of(before),
            100 * before.bubble_rate,
            objective.of(now),
            100 * now.bubble_rate,
            _mib(max(now.peak_memory) * min(spec.num_ranks, num_microbatches) * self._unit),
        )
        if self._keep is not None:
            self._keep(now)
        return plan

    def _better(self, so_far: Plan, num_microbatches: int) -> Plan:
        """What is found within the memory, or the order so far if that is better and keeps to it, too."""
        assert self._costs is not None
        spec, costs, limit = self._schedule.spec, self._costs, self._schedule.spec.memory_limit
        if self._rooms is not None:
            if min(self._rooms) <= 0:
                full = [f"{rank} ({_mib(-room * self._unit)} too much)" for rank, room in enumerate(self._rooms) if room <= 0]
                raise ConfigError(f"weights, gradients and optimizer state alone fill the memory limit on rank {', '.join(full)}")
            costs, limit = costs_within(costs, spec.placement, num_microbatches, self._rooms), 1.0
        share = 1.0 if num_microbatches == self._usual else 0.1
        options = replace(self._options, budget=share * self._options.budget, memory_limit=limit)
        found = executed_plan(spec, plan_of(spec.searched, num_microbatches, costs=costs, options=options))
        self._schedule.place(found)  # refuses what could deadlock in one hardware queue
        plans = [found]
        if limit is None or max(peak_memory(so_far, costs)) <= limit + MEMORY_TOLERANCE:
            plans.append(so_far)
        return min(plans, key=lambda plan: self._options.objective.of(simulate(plan, costs)))


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
