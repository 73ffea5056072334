"""What is asked of the planner: a schedule on a pipeline, its costs on any placement, limits and effort.

The flags of `zerobubble plan` and the page of the playground are read into the same record, and `planner.best` answers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import DEFAULT_OBJECTIVE, Objective
from megatron.zerobubble.plan.registry import schedule_spec
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.search.search_progress import Progress

SCALARS = ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "activation_after_backward")
"""Costs per rank and microbatch, by the names of the arguments of `CostModel.uniform`."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One schedule to plan, or `auto`."""

    schedule: str
    """A name in the registry, or `auto`."""
    num_ranks: int
    """Pipeline ranks, p."""
    num_microbatches: int
    """Microbatches per iteration, m."""
    num_chunks: int | None = None
    """Virtual stages (VPP) per rank, for interleaved schedules; None: the schedule's own."""
    num_slices: tuple[int, ...] = (1,)
    """Numbers of slices per microbatch to choose from; 1: microbatches are whole."""
    max_pending_backward: int | None = None
    """Most microbatches between F and W per rank, for `zb`; None: p."""
    memory_limit: float | None = None
    """None: the schedule's own, and for `auto` 1F1B's."""
    objective: Objective = DEFAULT_OBJECTIVE
    """Which iteration time to minimize."""
    effort: Effort | None = None
    """None: the hand-written order, where one is asked for without a memory limit."""
    seed: int = 0
    """Of searches."""
    workers: int = 1
    """Threads of searches."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Uniform costs, by the names of `SCALARS`; unused with `stages`."""
    stages: CostModel | None = None
    """Costs per stage; None: uniform ones."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """What surrounds the passes, per rank, by the names of `STEP_TIMES`. Empty: what `stages` have."""
    lengths: LengthsAndLinks = field(default_factory=LengthsAndLinks)
    """Of the microbatches and their slices, the costs being those of the mean length, and links, instead of one latency."""

    @property
    def is_plain(self) -> bool:
        """Whether all microbatches are equal, and all links."""
        return self.lengths.is_plain and (self.stages is None or self.stages.is_plain)

    @property
    def has_step(self) -> bool:
        """Whether what surrounds the passes counts."""
        return any(self.step.values()) or (self.stages is not None and self.stages.step is not None)

    def mean_costs(self, placement: Placement) -> CostModel:
        """The costs of whole microbatches of the mean length. Raises PlanError if they are for other stages."""
        return CostModel.uniform(placement, **self.times) if self.stages is None else self.stages

    def costs_of(self, placement: Placement, num_slices: int = 1) -> CostModel:
        """The costs for a placement, with those of every slice where it is known how they divide.

        Raises:
            PlanError: the costs are for other stages, or for another number of microbatches.
        """
        costs = self.lengths.applied(self.mean_costs(placement), num_slices)
        if any(self.step.values()):
            costs = replace(costs, step=StepCosts.uniform(placement, **self.step))
        costs.check_fits(placement, self.num_microbatches)
        return costs

    def spec(self, num_slices: int) -> ScheduleSpec:
        """The schedule with one of the numbers of slices. Raises ConfigError for what it does not take."""
        return schedule_spec(
            self.schedule,
            num_ranks=self.num_ranks,
            num_chunks=self.num_chunks,
            max_pending_backward=self.max_pending_backward,
            num_slices=num_slices,
        )

    def options(self, budget: float, progress: Progress | None = None) -> SearchOptions:
        """The options of a search for it."""
        return SearchOptions(
            memory_limit=self.memory_limit,
            objective=self.objective,
            seed=self.seed,
            workers=self.workers,
            progress=progress,
            budget=budget,
        )
