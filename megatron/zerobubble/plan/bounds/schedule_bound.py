"""Lower bounds on the span and the makespan of any plan under a memory limit.

Each bound is an argument about one rank or about one rank and that of stage 0 (`relaxations`, which has the arguments; the proofs
are in docs/adr/0039). The span is at least the largest of them.

With unequal microbatches the bounds hold for every assignment to slots: work and memory are summed over the microbatches, and a
path takes at every stage and link the time of the fastest one. With slices they hold for every order of the slices.

With all-to-alls that pairs hide the bounds are those of computation alone and those of communication alone: within the time of
a pair its two ops could run one after the other with either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.zerobubble.plan.bounds.instance import Instance
from megatron.zerobubble.plan.bounds.relaxations import arguments
from megatron.zerobubble.plan.costs.all_to_alls import without_overlap
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import PassTimes


@dataclass(frozen=True)
class TimeBound:
    """Lower bounds on both iteration times of some plans."""

    span_ms: float
    """No plan has a shorter span."""
    makespan_ms: float
    """No plan has a shorter makespan."""
    step: PassTimes | None = field(default=None, kw_only=True)
    """Likewise with what surrounds the passes; None: the costs have none."""

    def gap(self, span_ms: float) -> float:
        """How far a span is above its lower bound, as a share of the bound; the optimum lies in between."""
        return span_ms / self.span_ms - 1.0 if self.span_ms > 0 else 0.0

    def makespan_gap(self, makespan_ms: float) -> float:
        """How far a makespan is above its lower bound, as a share of the bound."""
        return makespan_ms / self.makespan_ms - 1.0 if self.makespan_ms > 0 else 0.0


@dataclass(frozen=True)
class Bound(TimeBound):
    """Lower bounds for every plan of one placement, number of microbatches, costs and memory limit."""

    bubble_rate: float
    """No plan has a smaller bubble rate (of the span)."""

    @staticmethod
    def of_any(bounds: Sequence[Bound]) -> Bound:
        """A bound for the plans of several placements: the smallest of theirs."""
        steps = [bound.step for bound in bounds if bound.step is not None]
        return Bound(
            span_ms=min(bound.span_ms for bound in bounds),
            makespan_ms=min(bound.makespan_ms for bound in bounds),
            step=TimeBound(min(each.span_ms for each in steps), min(each.makespan_ms for each in steps)) if steps else None,
            bubble_rate=min(bound.bubble_rate for bound in bounds),
        )


def lower_bound(placement: Placement, num_microbatches: int, costs: CostModel, memory_limit: float | None = None) -> Bound:
    """Lower bounds for `num_microbatches` on a placement under a memory limit (1.0 is 1F1B's rank 0; None: no limit).

    For plans with as many slices as the costs have (`CostModel.divided`).
    """
    costs.check_fits(placement, num_microbatches)
    unit = min(placement.num_ranks, num_microbatches)
    # Plans keep a limit up to rounding, so the bound uses a slightly larger one.
    limit = math.inf if memory_limit is None else memory_limit * unit * (1 + 1e-9) + 1e-9
    span = makespan = 0.0
    for each in without_overlap(costs):
        for found in arguments(Instance(placement, each, num_microbatches, limit)):
            span, makespan = max(span, found.span_ms), max(makespan, found.makespan_ms)
    instance = Instance(placement, without_overlap(costs)[0], num_microbatches, limit)
    busiest = max(instance.work(stages) for stages in placement.rank_to_stages)
    bubble_rate = max(0.0, span - busiest) / span if span > 0 else 0.0
    step = None
    if costs.step is not None:  # every rank steps once
        own = map(sum, zip(costs.step.optimizer_ms, costs.step.snapshot_ms, strict=True))
        step = TimeBound(span + min(own), makespan + min(costs.step.optimizer_ms))
    return Bound(span, makespan, bubble_rate, step=step)
