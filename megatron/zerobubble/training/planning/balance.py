"""Which layout of stages would suit the measured pipeline better (--zero-bubble-balance-stages).

The times come from iterations of the run, not from layers timed on their own before training: an iteration has F, B and W as they
really are, split, at the clock rate and beside the transfers of training, and it touches neither the random generators nor the
gradients that a trial backward would have to put back. What one layer, the embedding and the head take follows from it, because
stages differ by which of them they hold (`PartTimes.from_stages`). Where a window of iterations was timed for planning, its costs
are used; else the last recorded iteration.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.balance import PartTimes, balance
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.profiling.report import measured_costs

__all__ = ["log_balance", "measured_parts", "proposal"]

_log = logging.getLogger(__name__)


def log_balance(schedule: PipelineSchedule, layers: StageLayers, costs: CostModel | None) -> None:
    """Log what the model's parts take, and the layout that would suit them better. All ranks must call it.

    Args:
        schedule: what runs.
        layers: which layers its stages hold.
        costs: measured over several iterations, the same on all ranks; None: the last recorded iteration has to do.
    """
    times = measured_parts(schedule, layers, costs)
    if times is None:
        _log.warning("stages: not measured, because no iteration after the first one has been recorded")
    else:
        _log.info("%s", proposal(times, layers, schedule.spec.placement))


def measured_parts(schedule: PipelineSchedule, layers: StageLayers, costs: CostModel | None) -> PartTimes | None:
    """What the model's parts take, the same answer on all ranks. Arguments as of `log_balance`; all ranks must call it.

    A stage's time is that of its slowest member, over tensor parallelism and over the copies of the pipeline.

    Returns:
        None where there are no costs and no iteration was recorded.
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
    """F, B and W of one microbatch, per stage."""
    return [sum(passes) for passes in zip(costs.forward_ms, costs.backward_ms, costs.wgrad_ms, strict=True)]


def proposal(times: PartTimes, layers: StageLayers, placement: Placement) -> str:
    """A sentence for the log: what the parts take, and the layout that leaves the busiest rank the least to do.

    Args:
        times: of the model's parts.
        layers: what the stages hold now.
        placement: stage -> rank.
    """
    best = balance(layers.num_layers, placement, times)
    now, then = times.load(layers, placement), times.load(best, placement)
    apart = "" if layers.num_stages > 2 else " (two stages cannot tell them apart: one counts as layers only)"
    told = (
        f"stages: F, B and W of a microbatch take {times.layer_ms:.2f} ms in a layer, {times.embedding_ms:.2f} ms in the "
        f"embedding and {times.head_ms:.2f} ms in the head{apart}; the busiest rank computes {now.busiest_rank_ms:.2f} ms"
    )
    if now <= then:
        return f"{told}, and no other layout than {layers.text} leaves it less"
    return (
        f'{told}; with --pipeline-model-parallel-layout "{best.text}" it would be {then.busiest_rank_ms:.2f} ms, '
        f"{now.busiest_rank_ms / then.busiest_rank_ms:.2f} times as fast in the steady state"
    )
