"""Exports of a plan: files for other tools, and flags for pretrain_gpt.py."""

from __future__ import annotations

import enum
from typing import NamedTuple

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.render.plan_summary import plan_svg, plan_trace, title
from megatron.zerobubble.plan.simulate import Simulation

_SVG_WIDTH_PX = 1600
_SVG_MOST_PX = 24_000
_PX_PER_PASS = 14


class Export(enum.Enum):
    """File formats of an exported plan."""

    SVG = "svg"
    TRACE = "trace"


class TextFile(NamedTuple):
    """A file for the browser to save."""

    name: str
    media_type: str
    text: str


def export(simulation: Simulation, form: Export) -> TextFile:
    """Export a simulated plan as a file."""
    stem = stem_of(simulation.plan)
    if form is Export.TRACE:
        return TextFile(f"{stem}.trace.json", "application/json", plan_trace(simulation))
    width = max(_SVG_WIDTH_PX, min(_SVG_MOST_PX, _PX_PER_PASS * max(map(len, simulation.rows))))
    svg = plan_svg(simulation, title(simulation.plan.schedule), width_px=width)
    return TextFile(f"{stem}.svg", "image/svg+xml", svg)


def stem_of(plan: Plan) -> str:
    """A file name without extension: schedule, ranks and microbatches, in characters that every file system allows."""
    known = {info.name for info in known_schedules()}
    name = plan.schedule if plan.schedule in known else "plan"
    return f"{name}-p{plan.num_ranks}-m{plan.num_microbatches}"


def flags(plan: Plan, objective: Objective, costs: CostModel | None = None) -> list[str]:
    """Flags with which pretrain_gpt.py runs this plan, once it is saved as `stem_of(plan)`.json beside it.

    The batch is m microbatches of one sample, without data parallelism: with d data-parallel replicas and b samples per
    microbatch the global batch is m*d*b. A plan for unequal microbatches has none: a run has others in every iteration.
    """
    if plan.assignment or (costs is not None and costs.per_microbatch is not None):
        return []
    words = [
        f"--pipeline-model-parallel-size {plan.num_ranks}",
        f"--zero-bubble-load-plan {stem_of(plan)}.json",
        "--micro-batch-size 1",
        f"--global-batch-size {plan.num_microbatches}",
    ]
    if plan.placement.name == "loop" and plan.placement.num_chunks > 1:
        words.insert(1, f"--num-virtual-stages-per-pipeline-rank {plan.placement.num_chunks}")
    if objective is Objective.SPAN:
        words.append("--enable-optimizer-post-validation")
    return words
