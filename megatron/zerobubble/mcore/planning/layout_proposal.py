"""Proposes layers per stage that balance the measured pipeline (--zero-bubble-balance-stages).

The times come from iterations of the run, not from layers timed in isolation before training: F, B and W are split, and run at
the clock rate and beside the transfers of training; and no trial backward changes random number generators or gradients. The
times of one layer, the embedding and the head follow from those of the stages, which differ in what they hold
(`PartTimes.from_stages`). If iterations were profiled for re-planning their costs are used, else the last recorded iteration.
Profiled costs have memory, too: then partition, placement and order are searched for together, within the memory of the running
plan, and the fastest layout of all schedules is logged as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.zerobubble.mcore.planning.measured_layers import measured_model
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.balance import PartTimes, balance
from megatron.zerobubble.plan.partition.joint import plan_layout
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.search.search import evaluations_per_second
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.profiling.report import measured_costs

__all__ = ["layout_proposal", "measured_parts", "proposal"]

_LAYOUT_SECONDS = 0.25
"""Budget of the search for a layout; it spends about six times this."""
_WORTH = 0.01
"""Least gain, as a share of the iteration time, for which a layout is proposed."""


def layout_proposal(plan: Plan, kinds: Sequence[str], layers: StageLayers, costs: CostModel, objective: Objective) -> str:
    """One line: the running plan's simulated iteration time, and the fastest layout found with its flags. Takes a few seconds.

    Args:
        plan: the running plan.
        kinds: the kind of every decoder layer.
        layers: the layers of its stages.
        costs: their profiled costs.
        objective: which iteration time to minimize.

    Raises:
        ConfigError: the costs do not describe a model, for example if no layer takes time, or do not distinguish its kinds of
            layers.
    """
    simulation = simulate(plan, costs.plain)
    found = plan_layout(
        measured_model(kinds, layers, costs.plain),
        num_ranks=plan.num_ranks,
        num_microbatches=plan.num_microbatches,
        memory_bytes=max(simulation.peak_memory) * min(plan.num_ranks, plan.num_microbatches) * (1 + 1e-9),
        options=SearchOptions(objective=objective, budget=_LAYOUT_SECONDS * evaluations_per_second()),
    )
    now, then = objective.of(simulation), objective.of(found.result.simulation)
    line = f"layouts: the plan takes {now:.2f} ms per iteration {objective.label} in the simulator"
    least = f"no layout takes less than {objective.of(found.bound):.2f} ms"
    if then >= now * (1 - _WORTH):
        return f"{line}, and no layout was found that is {100 * _WORTH:.0f} % faster; {least}"
    name, chunks = found.result.name, found.layout.placement.num_chunks
    return (
        f'{line}; with --zero-bubble-schedule {name} --pipeline-model-parallel-layout "{found.layout.text}", '
        f"{chunks} stage(s) per rank and no more activation memory, it would take {then:.2f} ms, {now / then:.2f} times as fast; "
        f"{least}"
    )


def measured_parts(schedule: PipelineSchedule, layers: StageLayers, costs: CostModel | None) -> PartTimes | None:
    """The times of one layer, the embedding and the head, the same on all ranks. All ranks must call it.

    A stage's time is the maximum over its tensor-parallel ranks and data-parallel replicas.

    Args:
        schedule: the running schedule.
        layers: the layers of its stages.
        costs: costs profiled over several iterations, the same on all ranks; None: use the last recorded iteration.

    Returns:
        The times in ms; None without `costs` if no iteration was recorded.
    """
    if costs is not None:
        return PartTimes.from_stages(_stages_ms(costs), layers)
    timelines = schedule.timelines()
    if not timelines:
        return None
    costs = measured_costs(timelines[-1].plan, timelines[-1].rows)
    stages_ms = torch.tensor(_stages_ms(costs), dtype=torch.float64, device=schedule.device)
    dist.all_reduce(stages_ms, op=dist.ReduceOp.MAX)
    return PartTimes.from_stages(stages_ms.tolist(), layers)


def _stages_ms(costs: CostModel) -> list[float]:
    """Time of F, B and W of one microbatch, per stage, in ms."""
    return [sum(passes) for passes in zip(costs.forward_ms, costs.backward_ms, costs.wgrad_ms, strict=True)]


def proposal(times: PartTimes, layers: StageLayers, placement: Placement) -> str:
    """One line: times of the model's parts, and the layout with the least compute on the bottleneck rank.

    Args:
        times: times of one layer, the embedding and the head.
        layers: the current layers of the stages.
        placement: stage -> rank.
    """
    best = balance(layers.num_layers, placement, times)
    now, then = times.load(layers, placement), times.load(best, placement)
    caveat = "" if layers.num_stages > 2 else " (estimated: with two stages, one is assumed to hold layers only)"
    measured = (
        f"stages: F, B and W of a microbatch take {times.layer_ms:.2f} ms in a layer, {times.embedding_ms:.2f} ms in the "
        f"embedding and {times.head_ms:.2f} ms in the head{caveat}; the bottleneck rank computes {now.bottleneck_rank_ms:.2f} ms"
    )
    if now <= then:
        return f"{measured}, and no layout reduces that (now {layers.text})"
    return (
        f'{measured}; with --pipeline-model-parallel-layout "{best.text}" it would be {then.bottleneck_rank_ms:.2f} ms, '
        f"{now.bottleneck_rank_ms / then.bottleneck_rank_ms:.2f} times as fast in the steady state"
    )
