"""Predictions for every contender from what the first blocks measured, and the timelines to draw.

All predictions use the same pass times, or noise of one block would pass for a difference between schedules: the medians over all
contenders on the placement with the most stages, from which those of other placements follow (`jobs`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.zerobubble.bench.block import BlockResult
from megatron.zerobubble.bench.contenders import Contender
from megatron.zerobubble.bench.jobs import Job
from megatron.zerobubble.bench.speed_ups import Outcome
from megatron.zerobubble.errors import UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.svg import Panel
from megatron.zerobubble.plan.simulate import Simulation, simulate
from megatron.zerobubble.plan.timeline import Activity, Timeline
from megatron.zerobubble.profiling.report import report

__all__ = ["FirstBlock", "interleaved_ms", "panels", "predict"]

_VIRTUAL_SIZES = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class FirstBlock:
    """A contender and the result of its first block."""

    contender: Contender
    program: Job
    """What it runs."""
    result: BlockResult

    @property
    def timeline(self) -> Timeline | None:
        """The recorded iteration."""
        return None if self.result.measured is None else self.result.measured.timeline

    @property
    def costs(self) -> CostModel | None:
        """The profiled costs."""
        return None if self.result.measured is None else self.result.measured.costs

    def plan(self) -> Plan:
        """The plan that ran; of megatron-core's own schedules the one that they follow."""
        sizes = self.result.sizes
        if self.result.plan is not None:
            return Plan.from_json(self.result.plan)
        return build_plan(
            self.contender.plan_name,
            num_ranks=sizes.pipeline,
            num_microbatches=sizes.num_microbatches,
            num_chunks=self.contender.num_chunks,
        )


def predict(blocks: Sequence[FirstBlock], outcomes: Mapping[str, Outcome], job: Job) -> None:
    """Fill in what the planner predicts for each contender, and the bubble of its recorded iteration.

    Args:
        blocks: the first blocks that have ended.
        outcomes: of all contenders, by name.
        job: what is compared.
    """
    outside = _outside_ms(blocks)
    for block in blocks:
        outcome = outcomes[block.contender.text]
        if block.timeline is not None:
            outcome.bubble = report(block.timeline).bubble_rate
        simulation = None if job.has_unequal_lengths else _simulated(block, blocks, job)
        if simulation is None:
            continue
        outcome.predicted_bubble = simulation.bubble_rate
        unit = max(each.result.measured.unit_bytes for each in blocks if each.result.measured is not None)
        units = min(simulation.plan.num_ranks, simulation.plan.num_microbatches)
        outcome.predicted_activation_bytes = max(simulation.peak_memory) * units * unit or None
        if outside is not None:
            optimistic = block.program.zero_bubble.enable_optimizer_post_validation
            outcome.predicted_ms = Objective.with_optimizer(post_validation=optimistic).of(simulation) + outside


def interleaved_ms(blocks: Sequence[FirstBlock], job: Job) -> dict[int, float]:
    """Predicted time of megatron-core's interleaved 1F1B, by the number of chunks per rank, where the layers divide over them."""
    source, outside = _source(blocks), _outside_ms(blocks)
    tried = {each.contender.num_chunks for each in blocks if each.contender.is_stock}
    found: dict[int, float] = {}
    if job.has_unequal_lengths or not blocks:
        return found
    p, m = blocks[0].result.sizes.pipeline, blocks[0].result.sizes.num_microbatches
    for v in _VIRTUAL_SIZES:
        if source is None or outside is None or v in tried or p == 1 or m % p:
            continue
        try:
            plan = build_plan("interleaved-1f1b", num_ranks=p, num_microbatches=m, num_chunks=v)
            costs = job.costs_of(*source, None)(plan.placement)
        except UserError:
            continue
        found[v] = simulate(plan, costs).makespan_ms + outside
    return found


def panels(blocks: Sequence[FirstBlock], job: Job) -> list[Panel]:
    """One timeline per contender: the recorded iteration, or else the simulated one."""
    drawn = []
    for block in blocks:
        name = block.contender.text
        if block.timeline is not None:
            bubble = report(block.timeline).bubble_rate
            drawn.append(Panel(caption=f"{name}: measured, bubble {bubble:.1%}", ranks=block.timeline.ranks))
            continue
        simulation = _simulated(block, blocks, job)
        if simulation is not None:
            caption = f"{name}: simulated with measured pass times, bubble {simulation.bubble_rate:.1%}"
            drawn.append(Panel.of_ops(simulation.rows, caption=caption))
    return drawn


def _simulated(block: FirstBlock, blocks: Sequence[FirstBlock], job: Job) -> Simulation | None:
    """The contender's plan with measured costs."""
    source = _source(blocks)
    if source is None:
        return None
    plan = block.plan()
    try:
        return simulate(plan, job.costs_of(*source, block.program)(plan.placement))
    except UserError:
        return None


def _source(blocks: Sequence[FirstBlock]) -> tuple[CostModel, Job] | None:
    """The medians of the costs of all contenders on the placement with the most stages, and what ran on it; None if nothing was
    profiled."""
    known = [(block, block.costs, block.plan().placement) for block in blocks if block.costs is not None]
    if not known:
        return None
    placement = max((placement for _, _, placement in known), key=lambda each: each.num_stages)
    alike = [(block, costs) for block, costs, other in known if other == placement]

    def median(name: str) -> tuple[float, ...]:
        return tuple(statistics.median(values) for values in zip(*(getattr(costs, name) for _, costs in alike), strict=True))

    names = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")
    pairs = itertools.permutations(range(placement.num_ranks), 2)
    links = {
        pair: LinkTime(
            statistics.median(costs.link_ms(*pair) for _, costs in alike),
            statistics.median(costs.busy_ms(*pair) for _, costs in alike),
        )
        for pair in pairs
    }
    costs = CostModel.of_lists({name: median(name) for name in names}).with_links(links, placement.num_ranks)
    return costs, alike[0][0].program


def _outside_ms(blocks: Sequence[FirstBlock]) -> float | None:
    """Time of an iteration after its passes: gradients finalized, optimizer step. Of the rank that enters it last, so that
    waiting for others does not count; the median over contenders. None if nothing was recorded."""
    times = [_after_passes_ms(block.timeline) for block in blocks if block.timeline is not None]
    return statistics.median(times) if times else None


def _after_passes_ms(timeline: Timeline) -> float:
    kinds = (Activity.GRADIENTS, Activity.OPTIMIZER)
    return min(sum(span.end_ms - span.start_ms for span in rank.spans if span.activity in kinds) for rank in timeline.ranks)
