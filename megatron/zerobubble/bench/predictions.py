"""Predictions for every contender from what the blocks measured.

All predictions use the same pass times, or noise would pass for a difference between schedules: the medians over the blocks of
all contenders on the placement with the most stages, whose stages are merged into those of other placements. Slices have times of
their own, because kernels take longer for the same work in shorter pieces. Beside slices every contender's own count, the medians
over its blocks: where ranks share memory a pass takes longer while others compute, and that is not to pass for what slices cost.
What surrounds the passes are the medians over a contender's own blocks: its stages have buckets of their own.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.zerobubble.bench.block import BlockResult
from megatron.zerobubble.bench.contenders import Contender
from megatron.zerobubble.bench.jobs import Job
from megatron.zerobubble.bench.speed_ups import Idle, Outcome
from megatron.zerobubble.errors import UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import Simulation, simulate
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.profiling.recorded_step import step_costs
from megatron.zerobubble.profiling.report import PipelineReport, report
from megatron.zerobubble.profiling.report import measured_costs as times_of

__all__ = ["FirstBlock", "measured_costs", "predict"]


@dataclass(frozen=True, kw_only=True)
class FirstBlock:
    """A contender and the result of its first block."""

    contender: Contender
    program: Job
    """What it runs."""
    result: BlockResult
    recorded: list[Timeline] = field(default_factory=list)
    """The recorded iteration of each of the contender's blocks."""

    @property
    def is_sliced(self) -> bool:
        """Whether its microbatches are cut."""
        measured = self.result.measured
        return measured is not None and measured.costs is not None and measured.costs.table.has_slices

    @property
    def costs(self) -> CostModel | None:
        """The costs profiled in the first block, with the medians of its times and of those recorded in the later blocks."""
        costs = None if self.result.measured is None else self.result.measured.costs
        if costs is None or not costs.table.is_alike:
            return costs
        return _with_medians(costs, [costs, *self.times[1:]])

    @property
    def times(self) -> list[CostModel]:
        """The times of F, B and W in each recorded iteration; not of pairs, whose passes end together."""
        return [times_of(each.plan, each.rows) for each in self.recorded if not each.plan.pairs]

    @property
    def step(self) -> StepCosts | None:
        """What surrounded the passes of the recorded iterations; None if none was recorded."""
        found = [step for each in self.recorded if (step := step_costs(each)) is not None]
        return StepCosts.typical(found, statistics.median) if found else None

    @property
    def objective(self) -> Objective:
        """What its run minimizes."""
        return Objective.with_optimizer(post_validation=self.program.zero_bubble.enable_optimizer_post_validation)

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


def predict(blocks: Sequence[FirstBlock], outcomes: Mapping[str, Outcome]) -> None:
    """Fill in what the planner predicts for each contender, and the bubble of its recorded iteration.

    Args:
        blocks: the first blocks that have ended.
        outcomes: of all contenders, by name.
    """
    for block in blocks:
        outcome = outcomes[block.contender.text]
        if block.result.timeline is not None:
            found = report(block.result.timeline)
            outcome.bubble, outcome.idle = block.objective.bubble_of(found), _idle(found, block.objective)
            outcome.exposed_ms = found.exposed_all_to_all_ms or None
        simulation = _simulated(block, blocks)
        if simulation is None:
            continue
        outcome.predicted_bubble = block.objective.bubble_of(simulation)
        alike = [block] if simulation.costs.table.has_slices else blocks
        unit = max(each.result.measured.unit_bytes for each in alike if each.result.measured is not None)
        units = min(simulation.plan.num_ranks, simulation.plan.num_microbatches)
        outcome.predicted_activation_bytes = max(simulation.peak_memory) * units * unit or None
        if simulation.step is not None:
            outcome.predicted_ms = block.objective.of(simulation)


def _with_medians(costs: CostModel, blocks: Sequence[CostModel]) -> CostModel:
    """The costs with the medians of the blocks' times of F, B and W."""
    forward, backward, wgrad = (_medians([block.rows(name) for block in blocks]) for name in COST_LISTS[:3])
    return replace(costs, table=replace(costs.table, forward_ms=forward, backward_ms=backward, wgrad_ms=wgrad))


def _medians(blocks: Sequence[Sequence[Sequence[float]]]) -> tuple[tuple[float, ...], ...]:
    """The median of every number over blocks. [block][row][column] -> [row][column]"""
    return tuple(tuple(map(statistics.median, zip(*rows, strict=True))) for rows in zip(*blocks, strict=True))


def _idle(found: PipelineReport, objective: Objective) -> Idle:
    """The mean idle share of a recorded iteration, and its parts.

    Args:
        found: the recorded iteration.
        objective: of what length the shares are: the makespan, or with post-validation the span.
    """
    length = found.span_ms if objective is Objective.SPAN else found.makespan_ms
    share = 1.0 - statistics.fmean(rank.busy_ms for rank in found.ranks) / length
    work = [rank.busy_ms for rank in found.predicted_ranks]  # of median times, for a preempted pass is no imbalance
    without_messages = simulate(found.simulation.plan, replace(found.simulation.costs, comm_ms=0.0, links=None))
    imbalance = min(share, (max(work) - statistics.fmean(work)) / length)
    schedule = min(share - imbalance, max(0.0, objective.of_passes(without_messages) - max(work)) / length)
    return Idle(share=share, imbalance=imbalance, schedule=schedule, waiting=share - imbalance - schedule)


def _simulated(block: FirstBlock, blocks: Sequence[FirstBlock]) -> Simulation | None:
    """The contender's plan with measured costs, and with what surrounded its passes."""
    if block.is_sliced and block.costs is not None:
        return simulate(block.plan(), replace(block.costs, step=block.step))
    costs = measured_costs(blocks)
    if costs is None:
        return None
    plan = block.plan()
    try:
        costs = _of_stages(costs, plan)
        if block.times and any(each.is_sliced for each in blocks):
            costs = _with_medians(costs, block.times)
        return simulate(plan, replace(costs, step=block.step))
    except UserError:
        return None


def _of_stages(costs: CostModel, plan: Plan) -> CostModel:
    """The costs of a plan's stages, each made of as many of those that were profiled. Raises PlanError where that cannot be."""
    return costs if plan.num_stages == costs.num_stages else costs.merged(plan.num_stages)


def measured_costs(blocks: Sequence[FirstBlock]) -> CostModel | None:
    """The pass times that all predictions use; None if nothing was profiled.

    They are the medians of the costs of all contenders with whole microbatches, on the placement with the most stages.
    """
    known = [
        (block.costs, block.plan().placement) for block in blocks if block.costs is not None and not block.costs.table.has_slices
    ]
    if not known:
        return None
    placement = max((placement for _, placement in known), key=lambda each: each.num_stages)
    alike = [costs for costs, other in known if other == placement]

    def median(name: str) -> tuple[float, ...]:
        return tuple(statistics.median(values) for values in zip(*(getattr(costs, name) for costs in alike), strict=True))

    names = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")
    pairs = itertools.permutations(range(placement.num_ranks), 2)
    links = {
        pair: LinkTime(
            statistics.median(costs.link_ms(*pair) for costs in alike),
            statistics.median(costs.busy_ms(*pair) for costs in alike),
        )
        for pair in pairs
    }
    costs = CostModel.of_lists({name: median(name) for name in names}).with_links(links, placement.num_ranks)
    forward, backward = (statistics.median(costs.all_to_all[which] for costs in alike) for which in (0, 1))
    beside = max(costs.wgrad_beside for costs, _ in known)  # megatron-core's own schedules have no W
    return replace(costs, all_to_all=(forward, backward), wgrad_beside=beside)
