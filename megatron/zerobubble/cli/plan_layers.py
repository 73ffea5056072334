"""`zerobubble plan --layers FILE`: the best partition of a model's layers, the placement of its stages, and the plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from megatron.zerobubble.cli.parser import workers_of
from megatron.zerobubble.cli.progress_bar import stoppable
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.files import read_given
from megatron.zerobubble.flags.memory_limit import bytes_of
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.bounds.schedule_bound import TimeBound
from megatron.zerobubble.plan.costs.step_costs import STEP_TIMES
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.joint import LayoutResult, plan_layout
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.registry import check_at_least_one
from megatron.zerobubble.plan.render.plan_summary import headline, iteration_times
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.search.search_progress import Progress
from megatron.zerobubble.plan.simulate import Simulation

__all__ = [
    "MICROBATCHES_PER_RANK",
    "add_layer_flags",
    "layout_summary",
    "layout_to_json",
    "parse_bytes",
    "pipeline_sizes",
    "plan_layers",
]

MICROBATCHES_PER_RANK = 4
"""Microbatches per iteration and pipeline rank where --num-microbatches is not given."""
_OF_RANKS = ("costs", "memory_limit", "max_pending_backward", "microbatch_tokens", "links")
"""Flags that contradict --layers: what they say is in the file or follows from it."""
_SCALARS: dict[str, float | str] = {
    "forward_ms": 1.0,
    "backward_ms": 1.0,
    "wgrad_ms": 1.0,
    "comm_ms": 0.0,
    "activation_after_backward": 1.0,
    "attention_share": 0.0,
    "bytes_per_token": 0.0,
    "slices": "1",
    **dict.fromkeys(STEP_TIMES, 0.0),
}


def add_layer_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags to `plan`."""
    command.add_argument(
        "--layers",
        metavar="FILE",
        help="JSON with the model's layers, their times and bytes (zerobubble-layers/1; - reads standard input): search for the "
        "layout as well, and print it",
    )
    command.add_argument(
        "--pipeline-sizes",
        metavar="LIST",
        help="with --layers: other numbers of pipeline ranks to try on the same devices with the same global batch, for example "
        "4,8,16; --num-microbatches is that of --num-ranks",
    )
    command.add_argument("--memory", metavar="SIZE", help="memory of one device, with --layers, for example 70GiB (default: any)")
    command.add_argument(
        "--no-empty-stages", action="store_true", help="with --layers: every stage has a layer, the embedding or the head"
    )


def pipeline_sizes(text: str | None, num_ranks: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Ranks and microbatches of every pipeline to try: the same devices and global batch, divided otherwise.

    With half as many ranks per pipeline there are twice as many data-parallel replicas, each with half of the microbatches.

    Args:
        text: numbers of ranks, separated by commas; None: only `num_ranks`.
        num_ranks: the ranks that `num_microbatches` is for.
        num_microbatches: microbatches of one pipeline of `num_ranks`.

    Raises:
        ConfigError: not a list of numbers, or the microbatches do not divide.
    """
    if text is None:
        return [(num_ranks, num_microbatches)]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= len(word) <= 6 and int(word) > 0 for word in words):
        raise ConfigError(f"--pipeline-sizes is {quoted(text)}; give numbers of ranks separated by commas, such as 4,8,16")
    check_at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    sizes = sorted({int(word) for word in words} | {num_ranks})
    for size in sizes:
        if num_microbatches * size % num_ranks:
            raise ConfigError(
                f"--pipeline-sizes has {size}: the global batch of {num_microbatches} microbatches per pipeline of {num_ranks} "
                f"ranks does not divide over pipelines of {size}"
            )
    return [(size, num_microbatches * size // num_ranks) for size in sizes]


def parse_bytes(text: str) -> float:
    """Read `70GiB`, `80GB` or a number of bytes. Raises ConfigError on anything else."""
    stripped = text.strip()
    is_number = stripped.isascii() and stripped.isdecimal() and len(stripped) <= 15
    size = float(stripped) if is_number else bytes_of(stripped)
    if not size:
        raise ConfigError(f"--memory is {quoted(text)}; give a size above 0 such as 70GiB, 80GB or a number of bytes")
    return size


def _check_flags(args: argparse.Namespace) -> None:
    for name in _OF_RANKS:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --layers; drop one of the two")
    for name, default in _SCALARS.items():
        if getattr(args, name) != default:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --layers, whose file has all times; drop it")


def plan_layers(args: argparse.Namespace) -> tuple[LayoutResult, list[str]]:
    """Search for the layout that the flags of `plan` describe, until it is found or Ctrl-C takes the best so far.

    Returns:
        The fastest one, and with --pipeline-sizes a line per size.

    Raises:
        ConfigError: a malformed file or flag, or a model that does not fit the devices.
    """
    _check_flags(args)
    model = Model.from_json(read_given(args.layers))
    options = SearchOptions(
        objective=Objective(args.objective),
        seed=args.seed,
        workers=workers_of(args),
        budget=Effort(args.effort or "fast").budget,
    )
    memory = None if args.memory is None else parse_bytes(args.memory)
    usual = MICROBATCHES_PER_RANK * args.num_ranks
    sizes = pipeline_sizes(args.pipeline_sizes, args.num_ranks, usual if args.num_microbatches is None else args.num_microbatches)
    what = f"planning the layout of {model.num_layers} layers, " + " or ".join(
        f"{ranks} pipeline ranks (PP)" for ranks, _ in sizes
    )

    def work(progress: Progress) -> tuple[LayoutResult, list[str]]:
        return _fastest(args, model, sizes, memory, replace(options, progress=progress))

    return stoppable(what, work, least="the best of its layout")


def _fastest(
    args: argparse.Namespace, model: Model, sizes: Sequence[tuple[int, int]], memory: float | None, options: SearchOptions
) -> tuple[LayoutResult, list[str]]:
    """The fastest layout of some numbers of ranks and microbatches, and a line for each if there are several."""
    found: list[LayoutResult] = []
    lines: list[str] = []
    for num_ranks, num_microbatches in sizes:
        title = f"{num_ranks} pipeline ranks (PP), {num_microbatches} microbatches"
        try:
            one = plan_layout(
                model,
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                memory_bytes=memory,
                schedule=args.schedule,
                num_chunks=args.num_chunks,
                options=options,
                allow_empty=not args.no_empty_stages,
            )
        except ConfigError as error:
            if len(sizes) == 1 or ((num_ranks, num_microbatches) == sizes[-1] and not found):
                raise
            lines.append(f"{title}: {error}")
            continue
        found.append(one)
        lines.append(
            f"{title}: {options.objective.of(one.result.simulation):.3f} ms per iteration {options.objective.label}, "
            f"{options.objective.of(one.bound):.3f} ms or more with any layout"
        )
    return min(found, key=lambda one: options.objective.of(one.result.simulation)), lines if len(sizes) > 1 else []


def layout_to_json(found: LayoutResult) -> str:
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


def _bounds(bound: TimeBound, simulation: Simulation) -> str:
    """Both lower bounds and the plan's gaps to them; a gap is never less than 0 but for rounding."""
    gaps = [max(0.0, 100 * gap) for gap in (bound.gap(simulation.span_ms), bound.makespan_gap(simulation.makespan_ms))]
    return (
        f"span {bound.span_ms:.3f} ms or more (gap {gaps[0]:.2f} %), "
        f"makespan {bound.makespan_ms:.3f} ms or more (gap {gaps[1]:.2f} %)"
    )


def layout_summary(found: LayoutResult, width: int, *, is_colored: bool = False) -> str:
    """The layout as a flag, the timeline in `width` columns, iteration times, bounds, and the memory of every rank."""
    layout, simulation = found.layout, found.result.simulation
    work = zip(*(layout.ranks(name) for name in ("forward_ms", "backward_ms", "wgrad_ms")), strict=True)
    ranks = [
        f"  rank {rank}: {sum(passes):.3f} ms of F, B and W per microbatch, {peak / 2**30:.2f} GiB at most"
        for rank, (passes, peak) in enumerate(zip(work, found.peak_bytes, strict=True))
    ]
    return "\n".join(
        [
            headline(simulation.plan),
            "",
            f'{layout.flag} "{layout.text}"',
            "",
            render_text(simulation.rows, max_width=width, is_colored=is_colored),
            "",
            iteration_times(simulation),
            f"this layout: {_bounds(found.result.bound, simulation)}",
            f"all layouts: {_bounds(found.bound, simulation)}; "
            f"{found.num_planned} planned, {found.num_ruled_out} ruled out by their bounds",
            *ranks,
        ]
    )
