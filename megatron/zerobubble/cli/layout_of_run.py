"""`zerobubble layout`: the best `--pipeline-model-parallel-layout` for the schedule of a run, megatron-core's own included.

It needs nothing of this package in the run. The layers are those of `zerobubble plan --layers`, or estimates from the flags of a
training script.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

from megatron.zerobubble.cli.output_files import write_text
from megatron.zerobubble.cli.parser import Parser, add_search_flags, workers_of
from megatron.zerobubble.cli.plan_layers import MICROBATCHES_PER_RANK, layout_to_json, parse_bytes
from megatron.zerobubble.cli.progress_bar import stoppable
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.files import read_given
from megatron.zerobubble.flags.dataclass_flags import add_group, from_namespace
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.joint import LayoutResult, plan_layout, plan_of_layout
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.model_estimate import ASSUMED, NOT_ESTIMATED, ModelFlags
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.search.search_progress import Progress

__all__ = ["add_layout_flags", "run_layout"]


class _Layouts(NamedTuple):
    """What `layout` compares: the best layout, the even split, and the best of all schedules."""

    best: LayoutResult
    even_ms: float | None
    """The same schedule and placement with the layers spread evenly, whether or not that fits the memory; None if they do not
    divide."""
    ours: LayoutResult


class _Asked(NamedTuple):
    """What to plan for."""

    model: Model
    num_ranks: int
    num_microbatches: int
    assumed: str | None
    """The device of estimated times; None: they are from --layers."""


def add_layout_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags to `layout`."""
    command.add_argument("--layers", metavar="FILE", help="the layers, as for plan; - reads standard input")
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
    command.add_argument("--schedule", default="1f1b", help="the schedule of the run (default %(default)s)")
    command.add_argument("--num-chunks", type=int, help="virtual stages (VPP) per rank of interleaved-1f1b (default: the best)")
    command.add_argument("--num-ranks", "-p", type=int, help="pipeline ranks (PP), p (default: those of a run's flags)")
    command.add_argument(
        "--num-microbatches",
        "-m",
        type=int,
        help=f"microbatches per iteration of one pipeline, m (default: by a run's flags, or {MICROBATCHES_PER_RANK} per rank)",
    )
    command.add_argument("--memory", metavar="SIZE", help="memory of one device, for example 70GiB (default: any)")
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
    memory = None if args.memory is None else parse_bytes(args.memory)

    def search(progress: Progress) -> _Layouts:
        options = SearchOptions(
            objective=Objective.MAKESPAN,  # stock runs have no post-validation
            seed=args.seed,
            workers=workers_of(args),
            budget=Effort(args.effort).budget,
            progress=progress,
        )

        def layout_of(schedule: str, num_chunks: int | None) -> LayoutResult:
            return plan_layout(
                asked.model,
                num_ranks=asked.num_ranks,
                num_microbatches=asked.num_microbatches,
                memory_bytes=memory,
                schedule=schedule,
                num_chunks=num_chunks,
                options=options,
                allow_empty=False,
            )

        best = layout_of(args.schedule, args.num_chunks)
        even = _evenly(best, asked.num_microbatches, options)
        return _Layouts(best, even, best if args.schedule == AUTO else layout_of(AUTO, None))

    found = stoppable(f"planning the layout of {asked.model.num_layers} layers", search, least="the best of its layout")
    if args.json is not None:
        own, ours = json.loads(layout_to_json(found.best)), json.loads(layout_to_json(found.ours))
        write_text(
            args.json, json.dumps(own | {"even_makespan_ms": found.even_ms, "with_zerobubble": ours, "assumed": asked.assumed})
        )
    if args.json != "-":
        print("\n".join(_report(found)))
        if asked.assumed is not None:
            print(
                f"Times and bytes are estimated, for {asked.assumed}; a run with --zero-bubble-trace measures them for --layers."
            )


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
        num_microbatches = MICROBATCHES_PER_RANK * num_ranks
    return _Asked(model, num_ranks, num_microbatches, None if flags is None else ASSUMED)


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


def _evenly(best: LayoutResult, num_microbatches: int, options: SearchOptions) -> float | None:
    """The iteration time of a layout's schedule with its layers spread evenly; None if they do not divide."""
    model, placement = best.layout.model, best.layout.placement
    try:
        per_stage = StageLayers.spread(model.num_layers, placement).per_stage
    except ConfigError:
        return None
    layout = Layout(model=model, placement=placement, per_stage=per_stage)
    return plan_of_layout(best.result.name, layout, num_microbatches, None, options)[1].simulation.makespan_ms


def _report(found: _Layouts) -> list[str]:
    best, ours = found.best, found.ours
    mine, theirs = best.result.simulation.makespan_ms, ours.result.simulation.makespan_ms
    bound = best.result.bound.makespan_ms
    ranks = [f"  rank {rank}: {peak / 2**30:.2f} GiB at most" for rank, peak in enumerate(best.peak_bytes)]
    even = (
        []
        if found.even_ms is None
        else [f"  {found.even_ms / mine:.3f} times as fast as with the layers spread evenly ({found.even_ms:.3f} ms)"]
    )
    return [
        f'{best.layout.flag} "{best.layout.text}"',
        "",
        f"{best.result.titled(best.result.name)}: {mine:.3f} ms per iteration {Objective.MAKESPAN.label}, simulated",
        *even,
        f"  this layout needs {bound:.3f} ms or more (gap {max(0.0, 100 * (mine / bound - 1)):.2f} %), any layout and schedule "
        f"{best.bound.makespan_ms:.3f} ms or more (gap {max(0.0, 100 * best.bound.makespan_gap(mine)):.2f} %)",
        *ranks,
        f"with {ours.result.titled(ours.result.name)} of zerobubble: {theirs:.3f} ms, {mine / theirs:.3f} times as fast; "
        f'{ours.layout.flag} "{ours.layout.text}", {max(ours.peak_bytes) / 2**30:.2f} GiB at most',
    ]
