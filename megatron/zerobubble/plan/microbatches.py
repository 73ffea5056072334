"""Plans for the microbatches of an iteration as they are: one planner per run, asked once per iteration.

What depends on the schedule alone, its order for equal microbatches of the mean size, is planned once. What depends on the
lengths, the assignment of microbatches to the plan's slots and the order that suits them, takes tens of milliseconds for each.
Where long microbatches have more slices than short ones, it is the order of as many microbatches as there are slices (`recut`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import plan_of, schedule_info
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.assign import ITERATION_BUDGET, assign
from megatron.zerobubble.plan.search.search_options import (
    SearchOptions,
    check_memory_limit,
    memory_of_microbatches,
    smallest_memory,
)
from megatron.zerobubble.plan.simulate import peak_memory
from megatron.zerobubble.plan.transforms import recut
from megatron.zerobubble.plan.validate import validate

_SMALLER_LIMITS = (0.85, 0.7, 0.5, 0.35)
"""Memory limits, as shares of the requested one, of further orders to start from where the data as it comes does not fit: long
microbatches leave space for fewer."""


_ABOUT = 1.1
"""What an order may need of another one's memory to count as one that needs as much."""


class MicrobatchPlanner:
    """Plans a schedule for iteration after iteration, each with unequal microbatches of its own.

    The same arguments give the same plans on every rank and machine. A schedule that is one hand-written order keeps it (W may
    run earlier where memory demands it); a searched one is improved for the lengths. The plan of equal microbatches is the same
    as without this class, to the op.

    Args:
        spec: the schedule.
        num_microbatches: m, at least 1.
        costs: times and memory for the schedule's own order; None: F=B=W, free links.
        options: memory limit, objective, seed and op evaluations per iteration. None, and no memory limit: see `assign`.
        base_options: the search for the schedule's own order; None: the hand-written order, or under a memory limit a search
            without a budget.
        base: the schedule's plan for equal microbatches, if it is known; None: it is planned here.

    Raises:
        ConfigError: as `plan_of`.
        PlanError: as `plan_of`.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        num_microbatches: int,
        *,
        costs: CostModel | None = None,
        options: SearchOptions | None = None,
        base_options: SearchOptions | None = None,
        base: Plan | None = None,
    ) -> None:
        self._fixed = not schedule_info(spec.name).is_searched or spec.loaded_plan is not None
        self._options = options or SearchOptions(budget=ITERATION_BUDGET)
        limit, plain = self._options.memory_limit, None if costs is None else costs.plain
        if base_options is None and limit is not None:
            base_options = replace(self._options, budget=0.0)
        self._spec, self._m, self._plain, self._base_options, self._given = spec, num_microbatches, plain, base_options, base
        if costs is None or not costs.slice_counts:
            _ = self.base  # now, and not in the first iteration

    @cached_property
    def base(self) -> Plan:
        """The schedule's plan for equal microbatches."""
        return self._given or plan_of(self._spec, self._m, costs=self._plain, options=self._base_options)

    def plan(self, costs: CostModel) -> Plan:
        """The validated plan for microbatches with these costs.

        Raises:
            ConfigError: a memory limit that the largest microbatch alone exceeds; the message has its tokens.
            PlanError: costs of another size, or an order that is fixed and fits the limit with no assignment that was tried.
        """
        limit = self._options.memory_limit
        check_memory_limit(self._spec.placement, self._m, costs, limit)
        has_own_slices = self._spec.num_slices > 1 and not costs.table.is_alike
        own, others = self._orders_of_slices(costs) if has_own_slices else (self.base, [])
        if limit is not None and max(peak_memory(own, costs)) > limit:
            others += self._within_smaller(partial(self._of_passes, costs)) if has_own_slices else self._smaller
        plan = assign(own, costs, self._options, others=others, fixed_order=self._fixed)
        validate(plan, memory_limit=limit, costs=costs)
        return plan

    def _orders_of_slices(self, costs: CostModel) -> tuple[Plan, list[Plan]]:
        """The order for microbatches of these numbers of slices, and others. With no limit given, the memory of the first is it.

        It is the schedule's order of as many equal slices, some of which are left out, if that needs about as little memory as
        the order of as many microbatches as there are slices.
        """
        counts = costs.table.counts
        if self._given is not None or self._fixed:
            return recut(self._given or plan_of(self._spec, self._m), counts), []
        by_passes, own = self._of_passes(costs, self._base_options), recut(plan_of(self._spec, self._m), counts)
        if max(peak_memory(own, costs)) <= _ABOUT * max(peak_memory(by_passes, costs)):
            return own, [by_passes]
        return by_passes, []

    def _of_passes(self, costs: CostModel, options: SearchOptions | None) -> Plan:
        """The plan of slices as if each was a microbatch, under a memory limit that n - 1 more fit besides."""
        slices, placement = costs.table.counts, self._spec.placement
        number, each = sum(slices), costs.mean_pass
        if options is not None and options.memory_limit is not None:
            ahead = (max(slices) - 1) * memory_of_microbatches(placement, each)[0]
            rest = (options.memory_limit * min(placement.num_ranks, self._m) - ahead) / min(placement.num_ranks, number)
            options = replace(options, memory_limit=max(rest, smallest_memory(placement, number, each)))
        return recut(plan_of(replace(self._spec, num_slices=1), number, costs=each, options=options), slices)

    @cached_property
    def _smaller(self) -> list[Plan]:
        """The schedule's plans under smaller memory limits."""
        return self._within_smaller(lambda options: plan_of(self._spec, self._m, costs=self._plain, options=options))

    def _within_smaller(self, plan: Callable[[SearchOptions], Plan]) -> list[Plan]:
        """Plans with fewer microbatches in flight, of a schedule whose order may change."""
        limit, options, plans = self._options.memory_limit, self._base_options, list[Plan]()
        if limit is None or options is None or self._fixed:
            return plans
        for share in _SMALLER_LIMITS:
            with suppress(ConfigError, PlanError):  # too little for a microbatch of the mean size
                plans.append(plan(replace(options, budget=0.0, memory_limit=share * limit)))
        return plans
