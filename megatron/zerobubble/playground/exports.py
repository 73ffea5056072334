"""Exports of a plan: files for other tools, and the commands that run it."""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeGuard

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.render.plan_summary import plan_svg, title
from megatron.zerobubble.plan.simulate import Simulation
from megatron.zerobubble.playground.drawing import text_of

_SVG_WIDTH_PX = 1600
_SVG_MOST_PX = 24_000
_PX_PER_PASS = 14


class Export(enum.Enum):
    """File formats of an exported plan."""

    SVG = "svg"
    TEXT = "text"
    """Read by the page, for readers who cannot see a canvas."""


class TextFile(NamedTuple):
    """A file for the browser to save."""

    name: str
    media_type: str
    text: str


def export(simulation: Simulation, form: Export) -> TextFile:
    """Export a simulated plan as a file."""
    stem = stem_of(simulation.plan)
    if form is Export.TEXT:
        return TextFile(f"{stem}.txt", "text/plain", text_of(simulation.rows))
    width = max(_SVG_WIDTH_PX, min(_SVG_MOST_PX, _PX_PER_PASS * max(map(len, simulation.rows))))
    svg = plan_svg(simulation, title(simulation.plan.schedule), width_px=width)
    return TextFile(f"{stem}.svg", "image/svg+xml", svg)


def stem_of(plan: Plan) -> str:
    """A file name without extension: schedule, ranks and microbatches, in characters that every file system allows."""
    known = {info.name for info in known_schedules()}
    name = plan.schedule if plan.schedule in known else "plan"
    return f"{name}-p{plan.num_ranks}-m{plan.num_microbatches}"


def commands(plan: Plan, objective: Objective, costs: CostModel | None = None, layout: Layout | None = None) -> dict[str, str]:
    """Two ways to run a plan, once it is saved as `stem_of(plan)`.json: a command around a script, a call in a loop.

    A `layout` with as many layers in each stage is Megatron's own and needs no flag; any other one also says how many stages a
    rank has. The batch is m microbatches of one sample, without data parallelism: with d data-parallel replicas and b samples per
    microbatch the global batch is m*d*b. A plan for unequal microbatches has none: a run has others in every iteration.
    """
    if plan.assignment or plan.slice_counts or (costs is not None and costs.num_microbatches is not None):
        return {}
    file, chunks = f"{stem_of(plan)}.json", plan.placement.num_chunks
    sizes = [f"--pipeline-model-parallel-size {plan.num_ranks}"]
    ours, options = [f"--zero-bubble-load-plan {file}"], [f"plan={file!r}"]
    if _is_uneven(layout):
        sizes.append(f'{layout.flag} "{_text(layout)}"')
    elif chunks > 1:
        sizes.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    sizes += ["--micro-batch-size 1", f"--global-batch-size {plan.num_microbatches}"]
    if objective is Objective.SPAN:
        ours.append("--enable-optimizer-post-validation")
        options.append("optimizer_post_validation=True")
    if costs is not None and any(costs.all_to_all):
        ours.append("--zero-bubble-overlap-moe")
        options.append("overlap_moe=True")
    call = f"megatron.zerobubble.install({', '.join(options)})"
    built = [f"{chunks} model chunks per rank"] if chunks > 1 else []
    built += [f"the layers as {_text(layout)}"] if _is_uneven(layout) else []
    if built:
        call += f"  # the loop builds {' and '.join(built)}"
    run = f"torchrun --nproc-per-node {plan.num_ranks} -m megatron.zerobubble.run"
    return {"zerobubble run": " \\\n    ".join([run, *ours, "SCRIPT ITS FLAGS", *sizes]), "a loop of your own": call}


def _is_uneven(layout: Layout | None) -> TypeGuard[Layout]:
    return layout is not None and len(set(layout.per_stage)) > 1


def _text(layout: Layout) -> str:
    """The layout's text, with the MTP layers."""
    num_mtp = 0 if layout.model.is_hybrid else layout.model.num_mtp_layers
    return f"{layout.text.removesuffix('L')}{'m' * num_mtp}L" if num_mtp else layout.text
