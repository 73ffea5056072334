"""Under `auto`: whether another number of model chunks per rank, or another placement of them, would be faster.

A running loop has the chunks that it was started with, so `auto` chooses among their orders. The profiled times tell what other
stages would take: those of a layer, the embedding and the head follow from them (`Model.measured`).
"""

from __future__ import annotations

from dataclasses import replace

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import costs_of_placements
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import AUTO, above_limit_text, make_plan
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate

__all__ = ["chunk_advice"]

_WORTH = 0.01
"""Least gain, as a share of the iteration time, that is worth a line."""

_SHARE = 0.1
"""Of the budget of a search: other ranks wait, and their own search would come first in a run with those chunks."""


def chunk_advice(plan: Plan, layers: StageLayers, costs: CostModel, options: SearchOptions) -> str | None:
    """One line with what other chunks would take and the flags for them; None: no others are faster by 1 %.

    Interleaved 1F1B is in it, too, if only the memory limit rules it out.

    Args:
        plan: the running plan.
        layers: the layers of its stages, which are all of one kind.
        costs: their profiled costs.
        options: of the search; the memory limit is that of all plans, by default the running plan's memory.
    """
    running = simulate(plan, costs)
    limit = max(running.peak_memory) if options.memory_limit is None else options.memory_limit

    def layers_of(placement: Placement) -> StageLayers:
        if placement == plan.placement:
            raise ConfigError("it was searched already")
        return StageLayers.spread(layers.num_layers, placement)

    try:
        model = Model.measured(("layer",) * layers.num_layers, layers, costs)
        result = make_plan(
            PlanRequest(
                schedule=AUTO,
                num_ranks=plan.num_ranks,
                num_microbatches=plan.num_microbatches,
                stages=costs_of_placements(model, layers_of, costs),
                options=replace(options, memory_limit=limit, budget=_SHARE * options.budget),
            )
        )
    except (ConfigError, PlanError):
        return None
    now, then = (options.objective.of(each) for each in (running, result.simulation))
    found = []
    if then < now * (1 - _WORTH):
        start = _start(result.simulation.plan.placement)
        found.append(
            f"{result.name} with {start} would take {then / now:.2f} of this iteration time "
            f"({then:.2f} instead of {now:.2f} ms), its layers spread evenly"
        )
    if result.above_limit is not None and options.objective.of(result.above_limit) < now * (1 - _WORTH):
        found.append(above_limit_text(result.above_limit, now, options.objective))
    return f"by the measured times {'; '.join(found)}" if found else None


def _start(placement: Placement) -> str:
    """How a loop is started with these chunks."""
    if placement.num_chunks == 1:
        return "one model chunk per rank (without virtual pipeline stages)"
    chunks = f"{placement.num_chunks} model chunks per rank"
    flag = f"--num-virtual-stages-per-pipeline-rank {placement.num_chunks}"
    if placement.name == "V":
        return f"{chunks} in a V (--zero-bubble-v-schedule, in Megatron-LM's loop with {flag})"
    return f"{chunks} ({flag})"
