"""`zerobubble layout`: the best `--pipeline-model-parallel-layout` for a schedule, megatron-core's own included, and its plan.

A run of megatron-core's schedules needs nothing of this package to use it. The layers are those of a file, such as a run with
--zero-bubble-trace writes, or estimates from the flags of a training script.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.zerobubble.cli.output_files import columns, has_colors, write_text
from megatron.zerobubble.cli.parser import Parser, add_objective, add_search_flags, workers_of
from megatron.zerobubble.cli.plan_files import write_picture
from megatron.zerobubble.cli.progress_bar import stoppable
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.files import read_given
from megatron.zerobubble.flags.dataclass_flags import add_group, from_namespace
from megatron.zerobubble.flags.memory_limit import bytes_of
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.joint import LayoutResult, plan_layout, plan_of_layout
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.model_estimate import ASSUMED, NOT_ESTIMATED, ModelFlags
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.render.plan_summary import bounds, headline, iteration_times
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.search.search_progress import Progress

__all__ = ["add_layout_flags", "parse_bytes", "run_layout"]

_MICROBATCHES_PER_RANK = 4
"""Microbatches per iteration and pipeline rank where nothing says how many."""


class _Asked(NamedTuple):
    """What to plan for."""

    model: Model
    num_ranks: int
    num_microbatches: int
    memory_bytes: float | None
    """Of one device; None: any."""
    options: SearchOptions
    assumed: str | None
    """The device of estimated times; None: they are from --layers."""


class _Compared(NamedTuple):
    """What `layout` compares: the best layout of the schedule, the even split, and the best of all schedules."""

    best: LayoutResult
    even_ms: float | None
    """The same schedule and placement with the layers spread evenly, whether or not that fits the memory; None if they do not
    divide."""
    ours: LayoutResult


def add_layout_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags to `layout`."""
    command.add_argument(
        "--layers",
        metavar="FILE",
        help="JSON with the model's layers, their times and bytes (zerobubble-layers/1; - reads standard input)",
    )
    command.add_argument(
        "training",
        nargs="*",
        metavar="-- SCRIPT FLAGS",
        help="in place of --layers: the command line of a run; times and bytes are estimated from its sizes of model and batch "
        "(Megatron-LM's flags)",
    )
    command.add_argument(
        "--data-parallel-size", type=int, default=1, help="replicas of the pipeline, of a run's flags (default %(default)s)"
    )
    command.add_argument("--save-layers", metavar="FILE", help="write the layers, to change them and to give them to --layers")
    command.add_argument(
        "--schedule",
        default="1f1b",
        help="the schedule of the run; auto: the best of all, on any placement (default %(default)s)",
    )
    command.add_argument(
        "--num-chunks", type=int, help="virtual stages (VPP) per rank of interleaved schedules (default: the best of 2, 3 and 4)"
    )
    command.add_argument("--num-ranks", "-p", type=int, help="pipeline ranks (PP), p (default: those of a run's flags)")
    command.add_argument(
        "--num-microbatches",
        "-m",
        type=int,
        help=f"microbatches per iteration of one pipeline, m (default: by a run's flags, or {_MICROBATCHES_PER_RANK} per rank)",
    )
    command.add_argument("--memory", metavar="SIZE", help="memory of one device, for example 70GiB (default: any)")
    command.add_argument(
        "--empty-stages",
        action="store_true",
        help="stages inside the pipeline may be without layers, as megatron-core's layouts allow",
    )
    add_objective(command)
    add_search_flags(command, effort="fast")
    command.add_argument("--json", metavar="FILE", help="write layout, plan and times as JSON; - prints it and nothing else")


def run_layout(args: argparse.Namespace) -> None:
    """`layout`: search for the layout of the run's schedule, and for that of all schedules.

    Raises:
        ConfigError: a malformed file or flag, or a model that does not fit the devices.
    """
    asked = _asked(args)
    if args.save_layers is not None:
        write_text(args.save_layers, json.dumps({"assumed": asked.assumed} | asked.model.to_json(), indent=1))

    def search(progress: Progress) -> _Compared:
        options = replace(asked.options, progress=progress)
        best = _layout_of(asked, options, args.schedule, args.num_chunks, allow_empty=args.empty_stages)
        ours = best if args.schedule == AUTO else _layout_of(asked, options, AUTO, None, allow_empty=args.empty_stages)
        return _Compared(best, _even_ms(best, asked.num_microbatches, options), ours)

    what = f"planning the layout of {asked.model.num_layers} layers, {asked.num_ranks} pipeline ranks (PP)"
    found = stoppable(what, search, least="the best of its layout")
    if args.json is not None:
        own, ours = json.loads(_to_json(found.best)), json.loads(_to_json(found.ours))
        more = {"even_makespan_ms": found.even_ms, "with_zerobubble": ours, "assumed": asked.assumed}
        write_text(args.json, json.dumps(own | more))
    write_picture(args, found.best.result.simulation)
    if args.json != "-":
        print(_report(found, asked, columns(args.width)))


def _asked(args: argparse.Namespace) -> _Asked:
    """Read the layers of a file, or estimate those of the training script's flags. Raises ConfigError."""
    if (args.layers is None) == (not args.training):
        raise ConfigError(
            "give either --layers FILE, or -- and the command line of a run: zerobubble layout -- pretrain_gpt.py FLAGS"
        )
    if args.data_parallel_size < 1:
        raise ConfigError(f"--data-parallel-size is {args.data_parallel_size}; give 1 or more")
    flags = None if args.layers is not None else _flags_of_run(args.training)
    model = Model.from_json(read_given(args.layers)) if flags is None else flags.model(args.data_parallel_size)
    num_ranks, num_microbatches = args.num_ranks, args.num_microbatches
    if num_ranks is None and flags is not None:
        num_ranks = flags.pipeline_model_parallel_size
    if num_ranks is None:
        raise ConfigError("the number of pipeline ranks is missing: give --num-ranks")
    if num_microbatches is None and flags is not None:
        num_microbatches = flags.num_microbatches(args.data_parallel_size)
    if num_microbatches is None:
        num_microbatches = _MICROBATCHES_PER_RANK * num_ranks
    options = SearchOptions(
        objective=Objective(args.objective), seed=args.seed, workers=workers_of(args), budget=Effort(args.effort).budget
    )
    return _Asked(
        model=model,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        memory_bytes=None if args.memory is None else parse_bytes(args.memory),
        options=options,
        assumed=None if flags is None else ASSUMED,
    )


def _flags_of_run(words: Sequence[str]) -> ModelFlags:
    """Those flags of a command line that say something about the layers. Raises ConfigError for layers without an estimate."""
    for word in words:
        if word.partition("=")[0] in NOT_ESTIMATED:
            raise ConfigError(
                f"{word.partition('=')[0]}: only dense transformer layers are estimated; give --layers with the layers.json of "
                "a run with --zero-bubble-trace"
            )
    parser = Parser(prog="zerobubble layout --", allow_abbrev=False, add_help=False)
    add_group(parser, ModelFlags)
    return from_namespace(ModelFlags, parser.parse_known_args(words)[0])


def parse_bytes(text: str) -> float:
    """Read `70GiB`, `80GB` or a number of bytes. Raises ConfigError on anything else."""
    stripped = text.strip()
    is_number = stripped.isascii() and stripped.isdecimal() and len(stripped) <= 15
    size = float(stripped) if is_number else bytes_of(stripped)
    if not size:
        raise ConfigError(f"--memory is {quoted(text)}; give a size above 0 such as 70GiB, 80GB or a number of bytes")
    return size


def _layout_of(
    asked: _Asked, options: SearchOptions, schedule: str, num_chunks: int | None, *, allow_empty: bool
) -> LayoutResult:
    """The best layout of a schedule."""
    return plan_layout(
        asked.model,
        num_ranks=asked.num_ranks,
        num_microbatches=asked.num_microbatches,
        memory_bytes=asked.memory_bytes,
        schedule=schedule,
        num_chunks=num_chunks,
        options=options,
        allow_empty=allow_empty,
    )


def _even_ms(best: LayoutResult, num_microbatches: int, options: SearchOptions) -> float | None:
    """The iteration time of a layout's schedule with its layers spread evenly; None if they do not divide."""
    model, placement = best.layout.model, best.layout.placement
    try:
        per_stage = StageLayers.spread(model.num_layers, placement).per_stage
    except ConfigError:
        return None
    layout = Layout(model=model, placement=placement, per_stage=per_stage)
    return plan_of_layout(best.result.name, layout, num_microbatches, None, options)[1].simulation.makespan_ms


def _to_json(found: LayoutResult) -> str:
    """The plan's JSON form, with the layout beside it."""
    simulation = found.result.simulation
    body = json.loads(simulation.plan.to_json(costs=simulation.costs.to_json(), metrics=found.metrics()))
    body["layout"] = {
        "flag": found.layout.flag,
        "text": found.layout.text,
        "per_stage": list(found.layout.per_stage),
        "placement": found.layout.placement.name,
    }
    return json.dumps(body)


def _report(found: _Compared, asked: _Asked, width: int) -> str:
    """The layout as a flag, the timeline in `width` columns, times, bounds, the memory of every rank, and what others take."""
    best, ours, simulation = found.best, found.ours, found.best.result.simulation
    work = zip(*(best.layout.ranks(name) for name in ("forward_ms", "backward_ms", "wgrad_ms")), strict=True)
    lines = [f'{best.layout.flag} "{best.layout.text}"', "", headline(simulation.plan), ""]
    lines += [render_text(simulation.rows, max_width=width, is_colored=has_colors()), "", iteration_times(simulation)]
    if found.even_ms is not None:
        ratio = found.even_ms / simulation.makespan_ms
        lines.append(f"{ratio:.3f} times as fast as with the layers spread evenly ({found.even_ms:.3f} ms)")
    lines += [
        f"lower bounds of this layout: {bounds(best.result.bound, simulation)}; "
        f"{best.num_planned} layouts planned, {best.num_ruled_out} ruled out by their bounds",
    ]
    lines += [
        f"  rank {rank}: {sum(passes):.3f} ms of F, B and W per microbatch, {peak / 2**30:.2f} GiB at most"
        for rank, (passes, peak) in enumerate(zip(work, best.peak_bytes, strict=True))
    ]
    if ours is not best:
        objective = asked.options.objective
        theirs, ratio = (objective.of(ours.result.simulation), objective.of(simulation) / objective.of(ours.result.simulation))
        lines.append(
            f"with {ours.result.titled(ours.result.name)} of zerobubble: {theirs:.3f} ms, {ratio:.3f} times as fast; "
            f'{ours.layout.flag} "{ours.layout.text}", {max(ours.peak_bytes) / 2**30:.2f} GiB at most'
        )
    if asked.assumed is not None:
        lines.append(
            f"Times and bytes are estimated, for {asked.assumed}; a run with --zero-bubble-trace measures them for --layers."
        )
    return "\n".join(lines)
