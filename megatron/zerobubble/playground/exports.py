"""Exports of a plan: files for other tools, and the commands that run it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.render.plan_summary import plan_svg, plan_trace, title
from megatron.zerobubble.plan.simulate import Simulation
from megatron.zerobubble.playground.drawing import text_of

_SVG_WIDTH_PX = 1600
_SVG_MOST_PX = 24_000
_PX_PER_PASS = 14


class Export(enum.Enum):
    """File formats of an exported plan."""

    SVG = "svg"
    TRACE = "trace"
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
    if form is Export.TRACE:
        return TextFile(f"{stem}.trace.json", "application/json", plan_trace(simulation))
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


def flags(plan: Plan, objective: Objective, costs: CostModel | None = None, layout: Layout | None = None) -> list[str]:
    """Flags with which pretrain_gpt.py runs this plan, once it is saved as `stem_of(plan)`.json beside it.

    A `layout` with as many layers in each stage is Megatron's own and needs no flag; any other one also says how many stages a
    rank has.

    The batch is m microbatches of one sample, without data parallelism: with d data-parallel replicas and b samples per
    microbatch the global batch is m*d*b. A plan for unequal microbatches has none: a run has others in every iteration.
    """
    if plan.assignment or plan.slice_counts or (costs is not None and costs.num_microbatches is not None):
        return []
    words = [
        f"--pipeline-model-parallel-size {plan.num_ranks}",
        f"--zero-bubble-load-plan {stem_of(plan)}.json",
        "--micro-batch-size 1",
        f"--global-batch-size {plan.num_microbatches}",
    ]
    if _is_uneven(layout):
        words.insert(1, f'{layout.flag} "{_text(layout)}"')
    elif plan.placement.name == "loop" and plan.placement.num_chunks > 1:
        words.insert(1, f"--num-virtual-stages-per-pipeline-rank {plan.placement.num_chunks}")
    if objective is Objective.SPAN:
        words.append("--enable-optimizer-post-validation")
    if costs is not None and any(costs.all_to_all):
        words.append("--zero-bubble-overlap-moe")
    return words


def commands(plan: Plan, objective: Objective, costs: CostModel | None = None, layout: Layout | None = None) -> dict[str, str]:
    """Three ways to run a plan, by what takes them: a script's flags, a call in a loop, a command around a script.

    Empty for a plan for unequal microbatches, as `flags`.
    """
    words = flags(plan, objective, costs, layout)
    if not words:
        return {}
    file = f"{stem_of(plan)}.json"
    options = ", optimizer_post_validation=True" if objective is Objective.SPAN else ""
    options += ", overlap_moe=True" if "--zero-bubble-overlap-moe" in words else ""
    chunks = plan.placement.num_chunks
    sizes = [word for word in words if not word.startswith(("--zero-bubble", "--enable"))]
    if chunks > 1 and plan.placement.name != "loop" and not _is_uneven(layout):
        sizes.insert(1, f"--num-virtual-stages-per-pipeline-rank {chunks}")
    ours = [word for word in words if word not in sizes]
    call = f"megatron.zerobubble.install(plan={file!r}{options})"
    built = [f"{chunks} model chunks per rank"] if chunks > 1 else []
    built += [f"the layers as {_text(layout)}"] if _is_uneven(layout) else []
    if built:
        call += f"  # the loop builds {' and '.join(built)}"
    run = f"torchrun --nproc-per-node {plan.num_ranks} -m megatron.zerobubble.run"
    return {
        "pretrain_gpt.py": _continued(words),
        "a loop of your own": call,
        "zerobubble run": _continued([run, *ours, "SCRIPT ITS FLAGS", *sizes]),
    }


def _is_uneven(layout: Layout | None) -> TypeGuard[Layout]:
    return layout is not None and len(set(layout.per_stage)) > 1


def _text(layout: Layout) -> str:
    """The layout's text, with the MTP layers."""
    num_mtp = 0 if layout.model.is_hybrid else layout.model.num_mtp_layers
    return f"{layout.text.removesuffix('L')}{'m' * num_mtp}L" if num_mtp else layout.text


def _continued(words: Sequence[str]) -> str:
    """A command over several lines."""
    return " \\\n    ".join(words)
