"""Re-planning with timings profiled in the run itself.

A window of iterations is profiled. When it ends, rank 0 of the world plans for the measured times and broadcasts the plan; all
ranks validate it and run it from the next iteration on. Only the order of ops changes, never what they compute, but where
the number of slices is chosen by what the first window measured: then the losses change in their last digits.

One rank plans for all, because measured times differ slightly between ranks, and two ranks with different plans would deadlock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.errors import ConfigError, ZeroBubbleError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.expert_pairs import best_pairs, pairs_line
from megatron.zerobubble.mcore.profiled_window import Window
from megatron.zerobubble.mcore.state_memory import usable_bytes
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.costs.cost_model import Activations, CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.costs.slicing import NUMBERS_OF_SLICES, costs_of_other_slices
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import initial_plan, plan_of
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.assign import assign
from megatron.zerobubble.plan.search.search import evaluations_per_second
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import Simulation, peak_memory, simulate
from megatron.zerobubble.plan.transforms import executed_plan
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE, validate
from megatron.zerobubble.profiling.length_fit import fit_lengths
from megatron.zerobubble.profiling.profile import RankProfile, combine, costs_within, unit_bytes
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.profiling.recorded_step import step_costs
from megatron.zerobubble.profiling.report import RankMemory

__all__ = ["Measured", "Replanner", "Window", "budget_of", "make_replanner", "measured_costs"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


def budget_of(seconds: float) -> float:
    """The number of op evaluations that a search does in about `seconds`, with the core that is installed here.

    A budget counts evaluations, so the same timings give the same plan on any machine.
    """
    return seconds * evaluations_per_second()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one rank of the world."""

    profile: RankProfile
    """Times and memory of its passes."""
    links: Mapping[tuple[int, int], LinkTime]
    """A message on each of its outgoing links, by the pipeline ranks (sender, receiver)."""
    state_bytes: int = 0
    """Weights, gradients and optimizer state."""
    headroom_bytes: int = 0
    """Memory left for its activations; meaningless without a limit in bytes."""

    def gathered(self) -> list[Measured]:
        """All-gather over the world: the measurements of every rank, by global rank. All ranks must call this."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self)
        return everybody


def measured_costs(everybody: Sequence[Measured], placement: Placement) -> CostModel:
    """The costs of the pipeline that was profiled.

    Args:
        everybody: measurements of all ranks of the world.
        placement: the placement they were measured with.
    """
    slowest: dict[tuple[int, int], LinkTime] = {}
    for each in everybody:
        for pair, message in each.links.items():
            slowest[pair] = max(message, slowest.get(pair, message))  # of the replicas, which wait for each other
    return combine([each.profile for each in everybody], placement, slowest)


class Replanner:
    """Profiles windows of iterations and gives the schedule better plans.

    Every rank of the world must construct one and call its methods at the same points.

    Args:
        schedule: the schedule whose iterations are profiled and which runs the plans.
        window: which iterations are profiled.
        options: objective, seed and budget of a search. The memory limit is the spec's, or follows from `headroom_bytes`.
        num_microbatches: of most iterations. Searches for other numbers (batch size ramp-up) get a tenth of the budget.
        headroom_bytes: called on every rank at the end of a window with its profile; returns the bytes left for activations,
            which are then the rank's limit. None: no limit in bytes.
        state_bytes: called at the end of a window; returns the bytes of weights, gradients and optimizer state on this rank.
        chooses_slices: at the end of the first window, choose the number of slices.
        searches: whether the order of ops is searched; False: only which passes are paired follows from what was measured.
        on_plan: called on rank 0 of the world with every plan that is found, simulated with the measured costs.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        window: Window,
        options: SearchOptions,
        *,
        num_microbatches: int,
        headroom_bytes: Callable[[RankProfile], int] | None = None,
        state_bytes: Callable[[], int] = int,
        chooses_slices: bool = False,
        searches: bool = True,
        on_plan: Callable[[Simulation], None] | None = None,
    ) -> None:
        self._chooses_slices, self._searches = chooses_slices, searches
        self._schedule = schedule
        self._window = window
        self._options = options
        self._usual_num_microbatches = num_microbatches
        self._headroom_bytes, self._state_bytes = headroom_bytes, state_bytes
        self._unit_bytes = 0.0
        self._headroom: tuple[float, ...] | None = None
        """Per pipeline rank, in units of `_unit_bytes`; None without a limit in bytes."""
        self._on_plan = on_plan
        self._profiler: Profiler | None = None
        self._measured_with: int | None = None
        self._costs: CostModel | None = None
        self._step: StepCosts | None = None
        self._current: dict[int, Plan] = {}
        self.memory: tuple[RankMemory, ...] | None = None
        """Memory of each pipeline rank in the last window, measured and as its plan predicts; None if it was not measured."""
        self.by_length: LengthModel | None = None
        """Costs fitted to the lengths of unequal microbatches, 1.0 of activation memory being p of the usual length; None
        before the first window has ended, and where all are equal."""

    @property
    def costs(self) -> CostModel | None:
        """The costs measured in the last window; None before the first one has ended."""
        return self._costs

    @property
    def unit_bytes(self) -> float:
        """Bytes of one unit of the costs' activation memory; 0 before the first window has ended."""
        return self._unit_bytes

    @property
    def activations(self) -> Activations | None:
        """The activation memory per stage as measured in the last window; None if it was not."""
        if self._costs is None or self._unit_bytes <= 0:
            return None
        return (self._costs if self._schedule.unequal is None else self._costs.whole).activations

    def before(self, iteration: int, num_microbatches: int) -> None:
        """Call before an iteration, with its number of microbatches."""
        if self._schedule.is_fixed:
            self._profiler = self._schedule.hooks.profiler = None
            return
        if self._profiler is None and self._window.holds(iteration):
            self._profiler = Profiler(self._schedule.device)
            self._measured_with = num_microbatches
        self._schedule.hooks.profiler = self._profiler
        recordings = self._schedule.recordings  # of the next one the optimizer step comes after the planning
        recordings.is_asked = recordings.is_empty and self._window.ends(iteration + 1)

    def is_due(self, iteration: int) -> bool:
        """Whether `after` will plan after this iteration. No transfer between ranks may be in flight then."""
        return self._window.ends(iteration) and not self._schedule.is_fixed

    def after(self, iteration: int, num_microbatches: int) -> None:
        """Call after an iteration. At the end of a window it measures the links, plans, and gives the schedule the plan.

        Plans for other numbers of microbatches are made when an iteration first needs them.
        """
        if not self.is_due(iteration):
            return
        assert self._profiler is not None
        links = self._schedule.link_times()
        profile = self._profiler.profile()
        self._profiler = self._schedule.hooks.profiler = None
        own = Measured(
            profile=profile,
            links=links,
            state_bytes=self._state_bytes(),
            headroom_bytes=0 if self._headroom_bytes is None else self._headroom_bytes(profile),
        )
        everybody = own.gathered()
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        recorded = self._schedule.recordings.latest(pipeline, num_ranks=self._schedule.spec.num_ranks)
        self._step = None if recorded is None else step_costs(recorded)
        self._learn(everybody, num_microbatches)
        if self._chooses_slices:
            self._chooses_slices = False
            self._choose_slices(num_microbatches)
        self._schedule.replan(self._planned, self._costs)
        self._learn_lengths([each.profile for each in everybody], num_microbatches)
        self._schedule.plan(num_microbatches)

    def _learn(self, everybody: Sequence[Measured], num_microbatches: int) -> None:
        """Take costs, headroom and memory from the measurements of all ranks."""
        schedule, placement = self._schedule, self._schedule.spec.placement
        costs = replace(measured_costs(everybody, placement), wgrad_beside=schedule.wgrad_beside)
        if schedule.unequal is not None:  # whole microbatches were timed, and messages of slices
            costs = replace(costs, table=costs.table.cut(schedule.spec.num_slices))
        elif costs.table.has_slices:
            costs = replace(costs, table=replace(costs.table, tokens=schedule.slice_lengths))
        self._costs, self._unit_bytes = costs, unit_bytes([each.profile for each in everybody], placement)
        members = [[each for each in everybody if stages[0] in each.profile.memory] for stages in placement.rank_to_stages]
        self._headroom = self.memory = None
        if self._headroom_bytes is not None:
            self._headroom = tuple(min(each.headroom_bytes for each in ranks) / self._unit_bytes for ranks in members)
        if self._measured_with == num_microbatches and all(members) and schedule.unequal is None:
            self.memory = self._memory(schedule.plan(num_microbatches), members)

    def _learn_lengths(self, profiles: Sequence[RankProfile], num_microbatches: int) -> None:
        """Plan unequal microbatches with what was measured of each length."""
        unequal, placement = self._schedule.unequal, self._schedule.spec.placement
        if unequal is None or not any(each.timed for each in profiles):
            return
        assert self._costs is not None
        model, unit = fit_lengths(profiles, placement, usual_tokens=unequal.usual_tokens)
        self.by_length = model
        limit = self._schedule.spec.memory_limit
        if self._headroom is not None and unit > 0 and min(self._headroom) > 0:
            usual = min(placement.num_ranks, num_microbatches)
            held = [each * self._unit_bytes / unit for each in self._headroom]
            model, limit = model.within([usual / held[rank] for rank in placement.stage_to_rank]), 1.0
        unequal.learn(model, comm_ms=self._costs.comm_ms, links=self._costs.links, memory_limit=limit)
        _log.info("microbatches are planned by length: %s", model.text(unequal.usual_tokens))

    def _choose_slices(self, num_microbatches: int) -> None:
        """Cut microbatches into the slices with the best plan, the same on all ranks; all of them must call this."""
        lengths, self._costs = _of_rank_0(lambda: self._best_slices(num_microbatches))
        self._schedule.cut(lengths)

    def _best_slices(self, num_microbatches: int) -> tuple[tuple[int, ...], CostModel]:
        """The lengths of the slices with the best plan, and their costs, of equally good ones the fewest; logs all."""
        measured, spec, slicing = self._costs, self._schedule.spec, self._schedule.slicing
        assert measured is not None
        begin, found, refused, tokens = time.perf_counter(), {}, None, sum(self._schedule.slice_lengths)
        for n in NUMBERS_OF_SLICES:
            try:
                costs = costs_of_other_slices(measured, n, multiple=slicing.rule.multiple_of(tokens, n))
                limits = self._within(costs, num_microbatches)
                plan = self._found(replace(spec, num_slices=n), num_microbatches, *limits, 1 / len(NUMBERS_OF_SLICES))
            except ConfigError as error:  # too many for the sequence, or too few for the memory limit
                refused = error
            else:
                found[n] = self._options.objective.of(self._simulated(plan, costs)), costs, plan
        if not found:
            _log.warning("the slices are unchanged: %s", refused)
            return self._schedule.slice_lengths, measured
        best = min(found, key=lambda n: (found[n][0], n))
        _, costs, self._current[num_microbatches] = found[best]
        lengths = costs.table.tokens or (tokens,)
        _log.info(
            "microbatches are cut into slices of %s tokens; chosen in %.1f s by predicted ms per iteration, for each number: %s",
            ", ".join(map(str, lengths)),
            time.perf_counter() - begin,
            ", ".join(f"{n}: {time_ms:.1f}" for n, (time_ms, *_) in found.items()),
        )
        return lengths, costs

    def _memory(self, plan: Plan, members: Sequence[Sequence[Measured]]) -> tuple[RankMemory, ...]:
        """Memory in the iteration that ran `plan`, per pipeline rank: the maximum over its data- and tensor-parallel ranks."""
        assert self._costs is not None
        unit = self._unit_bytes * min(plan.num_ranks, plan.num_microbatches)
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
        plan = Plan.from_json(_of_rank_0(lambda: self._search(num_microbatches).to_json()))
        validate(plan)
        self._current[num_microbatches] = plan
        return plan

    def _search(self, num_microbatches: int) -> Plan:
        """The better one of the current order and the best that a search finds; logs what it predicts."""
        assert self._costs is not None
        begin = time.perf_counter()
        spec, costs, objective = self._schedule.spec, self._costs, self._options.objective
        current = executed_plan(spec, self._current.get(num_microbatches) or initial_plan(spec, num_microbatches))
        plan, has_planned = current, True
        try:
            plan = self._better(current, num_microbatches)
        except ConfigError as error:
            _log.warning("the order of ops is unchanged: %s", error)
            has_planned = False
        before, now = self._simulated(current, costs), self._simulated(plan, costs)
        _log.info(
            "re-planned with profiled timings in %.1f s: %s; predicted %.1f ms per iteration with the current order "
            "(bubble %.1f%%), %.1f ms with the new one (bubble %.1f%%), at most %s of activation memory per rank",
            time.perf_counter() - begin,
            costs.times_text,
            objective.of(before),
            100 * objective.bubble_of(before),
            objective.of(now),
            100 * objective.bubble_of(now),
            _mib(max(now.peak_memory) * min(spec.num_ranks, num_microbatches) * self._unit_bytes),
        )
        if self._schedule.overlaps_pairs and has_planned:
            _log.info("%s", pairs_line(now))
        if self._on_plan is not None:
            self._on_plan(now)
        return plan

    def _better(self, current: Plan, num_microbatches: int) -> Plan:
        """The best plan found within the memory limit, or the current one if it is better and within the limit, too.

        Where the passes of a pair overlap, any of them may have got pairs.
        """
        assert self._costs is not None
        spec, objective, plans = self._schedule.spec, self._options.objective, list[Plan]()
        share = 1.0 if num_microbatches == self._usual_num_microbatches else 0.1
        costs, limit = self._within(self._costs, num_microbatches)
        alone = executed_plan(spec, initial_plan(spec, num_microbatches))
        if not self._searches:
            plans.append(alone)
        else:
            plans.append(self._found(spec, num_microbatches, costs, limit, share))
            if self._step is not None:
                plans.append(self._found(spec, num_microbatches, costs, limit, 0.0))
        if limit is None or max(peak_memory(current, costs)) <= limit + MEMORY_TOLERANCE:
            plans.append(current)
        if self._schedule.overlaps_pairs:
            plans = [executed_plan(spec, plan) for plan in best_pairs(plans, alone, costs, objective, limit)]
        return min(plans, key=lambda plan: self._options.objective.of(self._simulated(plan, costs)))

    def _simulated(self, plan: Plan, costs: CostModel) -> Simulation:
        """The plan with what surrounds the passes, which the search does not know."""
        all_to_all = costs.all_to_all if self._schedule.overlaps_pairs or not plan.pairs else (0.0, 0.0)
        return simulate(plan, replace(costs, step=self._step, all_to_all=all_to_all))

    def _found(self, spec: ScheduleSpec, num_microbatches: int, costs: CostModel, limit: float | None, share: float) -> Plan:
        """The best plan that a search with a share of the budget finds within a memory limit, see `_within`."""
        options = replace(self._options, budget=share * self._options.budget, memory_limit=limit)
        found = plan_of(spec.searched, num_microbatches, costs=costs, options=options)
        if costs.links is not None and spec.num_slices == 1:  # which that search takes for equal
            found = replace(assign(found, costs, options), assignment=())  # all microbatches are equal
        return executed_plan(spec, found)

    def _within(self, costs: CostModel, num_microbatches: int) -> tuple[CostModel, float | None]:
        """The costs and the memory limit of a search: with headroom in bytes, in units of that."""
        spec = self._schedule.spec
        if self._headroom is None:
            return costs, spec.memory_limit
        if min(self._headroom) <= 0:
            lacking = {rank: -headroom * self._unit_bytes for rank, headroom in enumerate(self._headroom) if headroom <= 0}
            ranks = ", ".join(f"{rank} ({_mib(count)} too much)" for rank, count in lacking.items())
            raise ConfigError(f"weights, gradients and optimizer state alone exceed the memory limit on rank {ranks}")
        return costs_within(costs, spec.placement, num_microbatches, self._headroom), 1.0


def make_replanner(
    flags: ZeroBubbleConfig,
    schedule: PipelineSchedule,
    *,
    num_microbatches: int,
    state_bytes: Callable[[], int],
    ranks_on_host: int,
    on_plan: Callable[[Simulation], None],
) -> Replanner | None:
    """Make what profiles iterations and re-plans; None if the flags disable it or the schedule has a fixed order.

    Args:
        flags: which iterations are profiled, and what a plan may take.
        schedule: runs the model.
        num_microbatches: of most iterations.
        state_bytes: returns the bytes of weights, gradients and optimizer state on this rank.
        ranks_on_host: ranks that share the machine, and on the CPU its memory.
        on_plan: see `Replanner`.
    """
    if flags.timed_iterations is None or not (flags.searches or schedule.overlaps_pairs):
        return None
    limit = flags.memory_limit

    def headroom_bytes(profile: RankProfile) -> int:
        assert limit is not None
        total = limit.total_bytes or usable_bytes(schedule.device, ranks_on_host=ranks_on_host)
        return total - state_bytes() - profile.workspace_bytes

    start, end = flags.timed_iterations
    if schedule.graphs is not None:
        steps = schedule.graphs.warmup_steps  # from then on the plan is fixed
        start = flags.zero_bubble_pipeline_timers_start_iter or min(2, steps)
        end = flags.zero_bubble_pipeline_timers_end_iter or steps
        if dist.get_rank() == 0:
            _log.info("iterations %d to %d are profiled, before CUDA graphs of layers are captured", start, end)
    return Replanner(
        schedule,
        Window(start=start, end=end, interval=flags.zero_bubble_replan_interval),
        SearchOptions(
            objective=Objective.with_optimizer(post_validation=flags.enable_optimizer_post_validation),
            budget=budget_of(flags.zero_bubble_planning_seconds) if flags.searches else 0.0,
        ),
        num_microbatches=num_microbatches,
        headroom_bytes=headroom_bytes if flags.limits_bytes else None,
        state_bytes=state_bytes,
        chooses_slices=flags.chooses_slices,
        searches=flags.searches,
        on_plan=on_plan,
    )


def _of_rank_0(make: Callable[[], T]) -> T:
    """What rank 0 makes, or the error that it raises, on every rank; all of them must call this."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except ZeroBubbleError as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
