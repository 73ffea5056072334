"""Proposes layers per stage that balance the measured pipeline (--zero-bubble-balance-stages).

The times come from iterations of the run, not from layers timed in isolation before training: F, B and W are split, and run at
the clock rate and beside the transfers of training; and no trial backward changes random number generators or gradients. The
times of one layer, the embedding and the head follow from those of the stages, which differ in what they hold
(`Model.measured`). If iterations were profiled for re-planning their costs are used, else the last recorded iteration.
Partition, placement and order are searched for together, within the memory of the running plan: the fastest of all schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.joint import plan_layout
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.search.search import evaluations_per_second
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.profiling.report import measured_costs

__all__ = ["layout_proposal", "measured_parts", "recorded_costs"]

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
        costs: their costs, profiled or recorded.
        objective: which iteration time to minimize.

    Raises:
        ConfigError: the costs do not describe a model, for example if no layer takes time, or do not distinguish its kinds of
            layers.
    """
    simulation = simulate(plan, costs.plain)
    found = plan_layout(
        Model.measured(kinds, layers, costs.whole.plain),
        num_ranks=plan.num_ranks,
        num_microbatches=plan.num_microbatches,
        memory_bytes=max(simulation.peak_memory) * min(plan.num_ranks, plan.num_microbatches) * (1 + 1e-9),
        options=SearchOptions(objective=objective, budget=_LAYOUT_SECONDS * evaluations_per_second()),
    )
    now, then = objective.of(simulation), objective.of(found.result.simulation)
    line = f"layouts: the plan takes {now:.2f} ms per iteration {objective.label} in the simulator"
    if then >= now * (1 - _WORTH):
        return f"{line}, and no layout was found that is {100 * _WORTH:.0f} % faster"
    name, chunks = found.result.name, found.layout.placement.num_chunks
    return (
        f'{line}; with --zero-bubble-schedule {name} --pipeline-model-parallel-layout "{found.layout.text}", '
        f"{chunks} stage(s) per rank and no more activation memory, it would take {then:.2f} ms, {now / then:.2f} times as fast"
    )


def recorded_costs(schedule: PipelineSchedule) -> CostModel | None:
    """The costs of the last recorded iteration, the same on all ranks; None if none was recorded. All ranks must call it.

    A stage's time is the maximum over its tensor-parallel ranks and data-parallel replicas; memory and links are not measured.
    """
    timelines = schedule.timelines()
    if not timelines:
        return None
    costs = measured_costs(timelines[-1].plan, timelines[-1].rows)
    times = torch.tensor([costs.forward_ms, costs.backward_ms, costs.wgrad_ms], dtype=torch.float64, device=schedule.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    forward, backward, wgrad = (tuple(row) for row in times.tolist())
    return costs.with_lists(forward_ms=forward, backward_ms=backward, wgrad_ms=wgrad)


def measured_parts(kinds: Sequence[str], layers: StageLayers, placement: Placement, costs: CostModel) -> str:
    """One line: the times of a layer of every kind, the embedding and the head. Arguments as for `layout_proposal`."""
    model = Model.measured(kinds, layers, costs.plain)
    now = Layout(model=model, placement=placement, per_stage=layers.per_stage).bottleneck_ms
    each = ", ".join(f"{model.kinds[kind].work_ms:.2f} ms in a {kind}" for kind in dict.fromkeys(kinds))
    caveat = "" if layers.num_stages > 2 else " (estimated: with two stages, one is assumed to hold layers only)"
    return (
        f"stages: F, B and W of a microbatch take {each}, {model.first.work_ms:.2f} ms in the embedding and "
        f"{model.last.work_ms:.2f} ms in the head{caveat}; the bottleneck rank computes {now:.2f} ms"
    )
