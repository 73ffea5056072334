"""What a generator is asked for, and the search that most of them leave the order of ops to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.orders import SeedOrder
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions, smallest_memory
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE

__all__ = ["Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a generator: schedule, number of microbatches, costs and search options."""

    spec: ScheduleSpec
    """The schedule with its placement and limits."""
    num_microbatches: int
    """m."""
    costs: CostModel | None = None
    """None: uniform stages, F=B=W and free links."""
    options: SearchOptions | None = None
    """None: the hand-written pattern, or for a schedule without one a search without a budget."""

    @property
    def num_ranks(self) -> int:
        """p."""
        return self.spec.num_ranks

    @property
    def num_chunks(self) -> int:
        """v."""
        return self.spec.num_chunks

    @property
    def num_slices(self) -> int:
        """n."""
        return self.spec.num_slices

    @property
    def pending(self) -> int:
        """Most microbatches between F and W per rank, p by default."""
        return self.num_ranks if self.spec.max_pending_backward is None else self.spec.max_pending_backward

    def memory_of(self, num_pending: float) -> float:
        """The memory that a rank needs for `num_pending` microbatches at once; 1.0 is 1F1B's rank 0.

        With slices, for `num_pending` slices and the n-1 other ones of a microbatch, all of which run before the first B.
        """
        return (num_pending + self.num_slices - 1) / self.num_slices / min(self.num_ranks, self.num_microbatches)

    @property
    def num_passes(self) -> int:
        """Passes through a stage: a microbatch is one, or n."""
        return self.num_microbatches * self.num_slices

    def searched(
        self, memory_limit: float, seed_orders: Callable[[float], Sequence[SeedOrder]] = lambda _: (), *, fused: bool = False
    ) -> Plan:
        """The best plan that a search finds.

        Args:
            memory_limit: the schedule's own limit, see `options_within`.
            seed_orders: from the limit, in activations of microbatches, to the orders that the search starts from.
            fused: build plans of F and BW only.
        """
        placement, m, options = self.spec.placement, self.num_microbatches, self.options_within(memory_limit)
        limit = options.memory_limit
        memory = limit * min(placement.num_ranks, m) + MEMORY_TOLERANCE if limit is not None and limit >= 0 else 0.0
        seeds = seed_orders(memory)
        return search(self.spec.name, placement, m, self.stage_costs, options, seed_orders=seeds, fused=fused)

    @property
    def stage_costs(self) -> CostModel:
        """The requested costs, or uniform ones with F=B=W and free links; of every slice, if there are several."""
        costs = CostModel.uniform(self.spec.placement) if self.costs is None else self.costs
        return costs.divided(self.num_slices)

    def options_within(self, memory_limit: float) -> SearchOptions:
        """The search options, with a memory limit.

        Args:
            memory_limit: the schedule's own limit, for requests without one; 1.0 is 1F1B's rank 0. With uneven stages it is
                scaled to the rank with the most activation memory per microbatch.
        """
        options = self.options or SearchOptions(objective=Objective.SPAN, budget=0.0)  # whose bubble the papers give
        if options.memory_limit is not None:
            return options
        placement, costs = self.spec.placement, self.stage_costs.reserved
        costs.check_fits(placement)
        most = max(
            memory_limit * math.fsum(costs.activation[stage] for stage in stages) + self._more_keys(stages, memory_limit)
            for stages in placement.rank_to_stages
        )
        least = smallest_memory(placement, self.num_microbatches, costs)
        return replace(options, memory_limit=max(most, least))

    def _more_keys(self, stages: Sequence[int], memory_limit: float) -> float:
        """Memory of keys and values besides their share: a microbatch has all of them while any of its slices is in memory."""
        table, n = self.stage_costs.table, self.num_slices
        if not table.has_slices:
            return 0.0
        unit = min(self.num_ranks, self.num_microbatches)
        begun = 1 + (round(memory_limit * unit * n) + n - 2) // n
        return (begun / unit - memory_limit) * math.fsum(table.keys[s][0] + table.key_gradients[s][0] for s in stages)
