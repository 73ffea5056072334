"""Simulate the layouts that the planner finds against even ones under interleaved 1F1B, at the same device memory.

Five model shapes; their layer files in `docs/benchmarks/data/layers/` have times and bytes by formula. The page says which
formulas, and what the contenders are: even layouts, those with other numbers of layers on the first and last rank, partitions
found by our search under stock orders, and ours. Speed is the ratio of makespans.

  python -m tools.benchmarks.layouts --json docs/benchmarks/data/layouts.json --markdown docs/benchmarks/layouts.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from megatron.zerobubble.cli.layouts import parse_bytes
from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.joint import plan_layout, plan_of_layout
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.version import __version__
from tools.benchmarks.reports import ROOT, Row, markdown_table, run_report, with_tables

FORMAT = "zerobubble-layout-benchmark/1"
MEMORY = "70GiB"
CHUNKS = (1, 2, 3, 4)
PAGE = ROOT / "docs" / "benchmarks" / "layouts.md"
LAYERS = ROOT / "docs" / "benchmarks" / "data" / "layers"
NAMES = ("llama-3-8b", "gemma-2-9b", "deepseek-v3", "nemotron-h-8b", "kimi-k2")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model on a pipeline: its layer file, which has these besides the layers."""

    title: str
    num_ranks: int
    num_microbatches: int
    model: Model


def shape_named(name: str) -> Shape:
    """Read one of the five shapes. Raises ConfigError for another name."""
    if name not in NAMES:
        raise ConfigError(f"--shapes has {name!r}; choose from {', '.join(NAMES)}")
    text = (LAYERS / f"{name}.json").read_text(encoding="utf-8")
    body = json.loads(text)
    return Shape(model=Model.from_json(text), **{each.name: body[each.name] for each in fields(Shape) if each.name != "model"})


def even_layouts(num_layers: int, num_ranks: int, num_chunks: int) -> Iterator[tuple[int, ...]]:
    """Layers per stage of the loop placement, as even as they come: see the module's text."""
    stages = num_ranks * num_chunks
    for embedding, head in ((0, 0), (1, 0), (0, 1), (1, 1)):  # the accounting options count these as layers
        each, over = divmod(num_layers + embedding + head, stages)
        if over == 0 and each > max(embedding, head) - (stages == 1):
            counts = [each] * stages
            counts[0] -= embedding
            counts[-1] -= head
            yield tuple(counts)
    each, over = divmod(num_layers, stages)
    if over and each > 0:
        short = stages - over
        for at_start in sorted({0, short // 2}):
            yield (each,) * at_start + (each + 1,) * over + (each,) * (short - at_start)


def first_last_layouts(num_layers: int, num_ranks: int, num_chunks: int) -> Iterator[tuple[int, ...]]:
    """Layers per stage with other numbers on the first and on the last rank, each divided by its virtual stages."""
    if num_ranks < 3:
        return
    multiples = range(num_chunks, num_layers, num_chunks)
    for first, last in itertools.product(multiples, multiples):
        inner = num_layers - first - last
        if inner > 0 and inner % ((num_ranks - 2) * num_chunks) == 0:
            row = (first // num_chunks, *[inner // ((num_ranks - 2) * num_chunks)] * (num_ranks - 2), last // num_chunks)
            yield row * num_chunks


def interleaved(shape: Shape, num_chunks: int, counts: tuple[int, ...], memory_bytes: float) -> Row | None:
    """Interleaved 1F1B (1F1B with one stage per rank) with a given partition; None if it does not fit the memory."""
    layout = Layout(model=shape.model, placement=Placement.loop(shape.num_ranks, num_chunks), per_stage=counts)
    name = "1f1b" if num_chunks == 1 else "interleaved-1f1b"
    try:
        stages, result = plan_of_layout(name, layout, shape.num_microbatches, memory_bytes, SearchOptions(budget=0.0))
    except (ConfigError, PlanError):
        return None
    return _row(layout, result.name, result.simulation.makespan_ms, result.simulation.span_ms) | {
        "peak_gib": max(layout.peak_bytes(stages, result.simulation.peak_memory)) / 2**30
    }


def best_interleaved(shape: Shape, partitions: Sequence[tuple[int, tuple[int, ...]]], memory_bytes: float) -> Row | None:
    """The fastest of several partitions that fit."""
    rows = [row for chunks, counts in partitions if (row := interleaved(shape, chunks, counts, memory_bytes)) is not None]
    return min(rows, key=lambda row: float(row["makespan_ms"]), default=None)


def measure(shape: Shape, effort: Effort, memory_bytes: float) -> Row:
    """All contenders of one shape."""
    n, p = shape.model.num_layers, shape.num_ranks
    even = [(v, counts) for v in CHUNKS for counts in even_layouts(n, p, v)]
    uneven = [(v, counts) for v in CHUNKS for counts in first_last_layouts(n, p, v)]
    begin = time.perf_counter()
    ours = plan_layout(
        shape.model,
        num_ranks=p,
        num_microbatches=shape.num_microbatches,
        memory_bytes=memory_bytes,
        options=SearchOptions(objective=Objective.MAKESPAN, budget=effort.budget),
    )
    seconds = time.perf_counter() - begin
    alone = [_fixed(shape, name, memory_bytes) for name in ("1f1b", "interleaved-1f1b")]
    simulation = ours.result.simulation
    return {
        "title": shape.title,
        "num_ranks": p,
        "num_microbatches": shape.num_microbatches,
        "even": best_interleaved(shape, even, memory_bytes),
        "first_last": best_interleaved(shape, uneven, memory_bytes),
        "partition": min((row for row in alone if row is not None), key=lambda row: float(row["makespan_ms"]), default=None),
        "ours": _row(ours.layout, simulation.plan.schedule, simulation.makespan_ms, simulation.span_ms)
        | {"peak_gib": max(ours.peak_bytes) / 2**30, "seconds": seconds},
    }


def _fixed(shape: Shape, schedule: str, memory_bytes: float) -> Row | None:
    """The best partition found for a schedule with a fixed order; None if nothing fits the memory."""
    try:
        found = plan_layout(
            shape.model,
            num_ranks=shape.num_ranks,
            num_microbatches=shape.num_microbatches,
            memory_bytes=memory_bytes,
            schedule=schedule,
            options=SearchOptions(objective=Objective.MAKESPAN, budget=0.0),
        )
    except (ConfigError, PlanError):
        return None
    simulation = found.result.simulation
    return _row(found.layout, schedule, simulation.makespan_ms, simulation.span_ms) | {"peak_gib": max(found.peak_bytes) / 2**30}


def _row(layout: Layout, schedule: str, makespan_ms: float, span_ms: float) -> Row:
    return {
        "schedule": schedule,
        "num_chunks": layout.placement.num_chunks,
        "placement": layout.placement.name,
        "layout": layout.text,
        "makespan_ms": makespan_ms,
        "span_ms": span_ms,
    }


def markdown(body: Row) -> str:
    """The page with its tables."""
    heads = ("model", "p, m", "even", "first/last", "partition", "ours", "over even", "over first/last", "over partition")
    cells = []
    for row in body["rows"].values():
        found = [_cell(row[key]) for key in ("even", "first_last", "partition", "ours")]
        speeds = [_ratio(row, key) for key in ("even", "first_last", "partition")]
        cells.append([row["title"], f"{row['num_ranks']}, {row['num_microbatches']}", *found, *speeds])
    return with_tables(PAGE, [markdown_table(heads, cells)])


def _ratio(row: Row, key: str) -> str:
    return "none fits" if row[key] is None else f"{row[key]['makespan_ms'] / row['ours']['makespan_ms']:.3f}"


def _cell(row: Row | None) -> str:
    if row is None:
        return "none fits"
    return f"{row['makespan_ms']:.1f} / {row['span_ms']:.1f}, {row['schedule']} {row['num_chunks']}, {row['peak_gib']:.1f} GiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module's text."""
    prog, about = "python -m tools.benchmarks.layouts", (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = Parser(prog=prog, description=about)
    parser.add_argument("--shapes", default=",".join(NAMES), help="names of shapes, separated by commas (default: all)")
    parser.add_argument("--effort", choices=[effort.value for effort in Effort], default="fast", help="of the search")

    def measured(args: argparse.Namespace) -> Row:
        rows = {}
        shapes = [(name, shape_named(name)) for name in args.shapes.split(",")]
        for name, shape in track(shapes, "shapes"):
            rows[name] = measure(shape, Effort(args.effort), parse_bytes(MEMORY))
            speeds = _ratio(rows[name], "even"), _ratio(rows[name], "first_last")
            print(f"{name}: {speeds[0]} times as fast as even, {speeds[1]} as first/last", flush=True)
        return {"version": __version__, "effort": args.effort, "memory": MEMORY, "rows": rows}

    return run_report(parser, argv, FORMAT, measured, markdown)


if __name__ == "__main__":
    sys.exit(main())
