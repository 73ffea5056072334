"""Plans for the microbatches of an iteration as they are: one planner per run, asked once per iteration.

What depends on the schedule alone, its order for equal microbatches of the mean size, is planned once. What depends on the
lengths, the assignment of microbatches to the plan's slots and the order that suits them, takes tens of milliseconds for each.
Where long microbatches have more slices than short ones, it is the order of as many passes as there are (`recut`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import plan_of, schedule_info
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.assign import ITERATION_BUDGET, assign
from megatron.zerobubble.plan.search.search_options import SearchOptions, check_memory_limit, smallest_memory
from megatron.zerobubble.plan.simulate import peak_memory
from megatron.zerobubble.plan.transforms import recut
from megatron.zerobubble.plan.validate import validate

_SMALLER_LIMITS = (0.85, 0.7, 0.5, 0.35)
"""Memory limits, as shares of the requested one, of further orders to start from where the data as it comes does not fit: long
microbatches leave space for fewer."""


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
        if base_options is not None and base_options.memory_limit is not None and costs is not None and costs.unequal_slices:
            # As many slices as the longest microbatch has may be more than that one needs memory for; `assign` keeps the limit.
            least = smallest_memory(spec.placement, num_microbatches, costs.plain)
            base_options = None if self._fixed else replace(base_options, memory_limit=max(base_options.memory_limit, least))
        self._spec, self._plain, self._base_options = spec, plain, base_options
        self.base = base or plan_of(spec, num_microbatches, costs=plain, options=base_options)
        """The schedule's plan for equal microbatches, all with as many slices as the longest."""

    @cached_property
    def _smaller(self) -> list[Plan]:
        """The schedule's plans under smaller memory limits."""
        limit, options, plans = self._options.memory_limit, self._base_options, list[Plan]()
        if limit is None or options is None or self._fixed:
            return plans
        for share in _SMALLER_LIMITS:
            smaller = replace(options, budget=0.0, memory_limit=share * limit)
            with suppress(ConfigError, PlanError):  # too little for a microbatch of the mean size
                plans.append(plan_of(self._spec, self.base.num_microbatches, costs=self._plain, options=smaller))
        return plans

    def _cut(self, plan: Plan, costs: CostModel) -> Plan:
        """A plan with the slices that these microbatches have."""
        return recut(plan, [each.num_slices for each in costs.unequal_slices]) if costs.unequal_slices else plan

    def plan(self, costs: CostModel) -> Plan:
        """The validated plan for microbatches with these costs.

        Raises:
            ConfigError: a memory limit that the largest microbatch alone exceeds; the message has its tokens.
            PlanError: costs of another size, or an order that is fixed and fits the limit with no assignment that was tried.
        """
        base, limit = self._cut(self.base, costs), self._options.memory_limit
        check_memory_limit(base.placement, base.num_microbatches, costs, limit)
        fits = limit is None or max(peak_memory(base, costs)) <= limit
        smaller = [] if fits else [self._cut(plan, costs) for plan in self._smaller]
        plan = assign([base, *smaller], costs, self._options, fixed_order=self._fixed)
        validate(plan, memory_limit=limit, costs=costs)
        return plan
