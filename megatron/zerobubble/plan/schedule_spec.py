"""Which schedule runs, and what is known of it before the number of microbatches: one record from the flags to the planner.

`plan.registry.schedule_spec` makes one from a schedule's name, checks it and fills in the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.zerobubble.plan.ir import Placement, Plan

STOCK = "stock"
"""Name of the schedule that leaves scheduling to megatron-core."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """A schedule on a pipeline: name, placement, limits. Immutable, the same on every rank."""

    name: str
    """`stock`, or a name of `plan.registry`."""
    placement: Placement
    """Stage -> rank."""
    max_pending_backward: int | None = None
    """For `zb`: most microbatches between F and W on a rank; None: as many as there are pipeline ranks."""
    memory_limit: float | None = None
    """Most activation memory on any rank; 1.0 is what 1F1B holds on rank 0. None: the schedule's own."""
    overlaps_reductions: bool = False
    """Whether gradients are reduced over replicas while the last Ws run."""
    num_slices: int = 1
    """Slices of each microbatch along its sequence, n."""
    loaded_plan: Plan | None = None
    """A plan of this placement that is run for its own number of microbatches, instead of a generated one."""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks, p."""
        return self.placement.num_ranks

    @property
    def num_chunks(self) -> int:
        """Stages per rank, v: megatron-core's virtual pipeline size."""
        return self.placement.num_chunks

    @property
    def is_stock(self) -> bool:
        """Whether megatron-core schedules."""
        return self.name == STOCK

    @property
    def searched(self) -> ScheduleSpec:
        """The family to search for this placement and memory: ZB-H1 and ZB-H2 are hand-written members of `zb`."""
        pending = {"zb-h1": self.num_ranks, "zb-h2": 2 * self.num_ranks}
        if self.name not in pending:
            return self
        return replace(self, name="zb", max_pending_backward=pending[self.name])
