"""What is asked of the planner: a schedule on a pipeline, its costs on any placement, limits and effort.

The flags of `zerobubble plan` and the page of the playground are read into the same record, which `anytime` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.slicing import costs_of_other_slices
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import schedule_spec
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions

SCALARS = ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "activation_after_backward")
"""Costs per rank and microbatch, by the names of the arguments of `CostModel.uniform`."""

CostsOf = Callable[[Placement], CostModel]
"""Placement -> its costs. Raises PlanError for a placement whose costs are unknown."""


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
    """Numbers of slices per microbatch to choose from, of equally good ones the fewest; 1: microbatches are whole."""
    max_pending_backward: int | None = None
    """Most microbatches between F and W per rank, for `zb`; None: p."""
    options: SearchOptions = field(default_factory=SearchOptions)
    """Memory limit, objective, seed and threads. Without a limit it is the schedule's own, and for `auto` 1F1B's."""
    effort: Effort | None = None
    """None: the hand-written order, where there is one, and no search."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Uniform costs, by the names of `SCALARS`; unused with `stages`."""
    stages: CostModel | CostsOf | None = None
    """Costs per stage, or from a placement to them; None: uniform ones."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """What surrounds the passes, per rank, by the names of `STEP_TIMES`. Empty: what `stages` have."""
    all_to_all: float = 0.0
    """Share of F and of B in which tokens travel to their experts and back; 0: what `stages` have. Pairs and W may hide it."""
    lengths: LengthsAndLinks = field(default_factory=LengthsAndLinks)
    """Of the microbatches and their slices, the costs being those of the mean length, and links, instead of one latency."""

    def __post_init__(self) -> None:
        if not 0 <= self.all_to_all <= 1:
            raise ConfigError(f"all-to-all is {self.all_to_all}; give a share of F and of B, 0 to 1")

    @property
    def objective(self) -> Objective:
        """Which iteration time to minimize."""
        return self.options.objective

    @property
    def memory_limit(self) -> float | None:
        """See `options`."""
        return self.options.memory_limit

    @property
    def is_plain(self) -> bool:
        """Whether all microbatches are equal, and all links."""
        return self.lengths.is_plain and (not isinstance(self.stages, CostModel) or self.stages.is_plain)

    @property
    def has_step(self) -> bool:
        """Whether what surrounds the passes counts."""
        return any(self.step.values()) or (isinstance(self.stages, CostModel) and self.stages.step is not None)

    def mean_costs(self, placement: Placement) -> CostModel:
        """The costs of whole microbatches of the mean length. Raises PlanError if they are for other stages."""
        if self.stages is None:
            return CostModel.uniform(placement, **self.times)
        return self.stages if isinstance(self.stages, CostModel) else self.stages(placement)

    def costs_of(self, placement: Placement, num_slices: int = 1) -> CostModel:
        """The costs for a placement, with those of every slice; of other slices than a run measured, as fitted to those.

        Raises:
            PlanError: the costs are for other stages, or for another number of microbatches.
        """
        costs = self.lengths.applied(self.mean_costs(placement), num_slices)
        if any(self.step.values()):
            costs = replace(costs, step=StepCosts.uniform(placement, **self.step))
        if self.all_to_all:
            costs = replace(costs, all_to_all=(self.all_to_all,) * 2, wgrad_beside=1.0)
        costs.check_fits(placement, self.num_microbatches)
        is_measured = self.lengths.sequence_length is None and costs.table.is_alike and any(costs.table.tokens)
        if is_measured and costs.table.has_slices and num_slices != costs.num_slices:
            return costs_of_other_slices(costs, num_slices)
        return costs.divided(num_slices)

    def spec(self, num_slices: int) -> ScheduleSpec:
        """The schedule with one of the numbers of slices. Raises ConfigError for what it does not take."""
        return schedule_spec(
            self.schedule,
            num_ranks=self.num_ranks,
            num_chunks=self.num_chunks,
            max_pending_backward=self.max_pending_backward,
            num_slices=num_slices,
        )

    def with_options(self, **changed: Any) -> Self:
        """The request with other fields of its options."""
        return replace(self, options=replace(self.options, **changed))
