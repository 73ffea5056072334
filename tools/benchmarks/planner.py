"""Benchmark the planner: bubble rates against published ones and against its own lower bounds, and the planning time.

It prints one line per plan. Bubble rates are compared as published, with four decimals.

  points   published schedules at their memory; zbv between and beyond
  auto     the best within a memory limit, against the best published schedule that fits

examples:
  python -m tools.benchmarks.planner --jobs 2 --json docs/benchmarks/data/planner.json --markdown docs/benchmarks/planner.md
  python -m tools.benchmarks.planner --rows 0,19 --effort fast
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import AUTO, make_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from tools.benchmarks.published_times import Config, read_configs
from tools.benchmarks.reports import PUBLISHED, Row, markdown_table, mean_and_range, origin, run_report
from tools.docs.wrap import wrapped

FORMAT = "zerobubble-planner-benchmark/2"
LIMITS, EXACT = (0.5, 0.625, 0.75, 1.0, 1.25, 1.5, 2.0), 1e-9


class Point(NamedTuple):
    """A schedule at a memory limit, compared with a published one."""

    name: str
    schedule: str
    memory: float
    published: str
    at_peak: bool = False
    """The limit is at least the peak memory of the published schedule."""


POINTS = (
    Point("zb@1", "zb", 1.0, "ZB-1p"),
    Point("zb@2", "zb", 2.0, "ZB-2p", at_peak=True),
    Point("zbv@1", "zbv", 1.0, "ZBV"),
    Point("v-half", "v-half", 0.0, "V-half", at_peak=True),
    Point("v-min", "v-min", 0.0, "V-min", at_peak=True),
    Point("zbv@0.75", "zbv", 0.75, "V-half"),
    Point("zbv@1.25", "zbv", 1.25, "ZBV"),
)


def options(effort: str | None, num_ranks: int, memory_limit: float) -> SearchOptions:
    """Search options for p ranks under a memory limit, by default with more effort where p > 16."""
    budget = Effort(effort or ("max" if num_ranks > 16 else "default")).budget
    return SearchOptions(memory_limit=memory_limit, objective=Objective.SPAN, budget=budget)


class Task(NamedTuple):
    """One plan of a section to measure. Picklable, for other processes."""

    config: Config
    schedule: str
    options: SearchOptions
    labels: Row


def measure(task: Task) -> Row:
    """Plan and measure; `seconds` is the time from the request to the simulated plan and its lower bound."""
    config, options = task.config, task.options
    p, m = config.num_ranks, config.num_microbatches
    begin = time.perf_counter()
    result = make_plan(
        PlanRequest(schedule=task.schedule, num_ranks=p, num_microbatches=m, stages=config.costs_of, options=options)
    )
    seconds = time.perf_counter() - begin
    simulation = result.simulation
    row: Row = {"row": config.row, "model": config.model, "p": p, "m": m, "limit": options.memory_limit} | task.labels
    row |= {"schedule": result.name, "ours": round(simulation.bubble_rate, 9), "bound": round(result.bound.bubble_rate, 9)}
    row["gap"] = round(result.bound.gap(simulation.span_ms), 7) + 0.0  # a plan at its bound is not below it by a rounding error
    row["seconds"] = round(seconds, 3)
    return row


def measured_all(tasks: Sequence[Task], jobs: int) -> Iterator[Row]:
    """Measure all tasks, in `jobs` processes; the rows come in order."""
    if jobs == 1:
        yield from map(measure, tasks)
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            yield from pool.imap(measure, tasks)


def point_tasks(configs: Iterable[Config], effort: str | None) -> list[Task]:
    """Every point of every config that has its published schedule."""
    tasks = []
    for config in configs:
        for point in (point for point in POINTS if point.published in config.reference):
            reference = config.reference[point.published]
            limit = max(point.memory, reference.peak_memory) if point.at_peak else point.memory
            labels = {"point": point.name, "published": point.published, "reference": reference.bubble_rate}
            tasks.append(Task(config, point.schedule, options(effort, config.num_ranks, limit), labels))
    return tasks


def auto_tasks(configs: Iterable[Config], effort: str | None) -> list[Task]:
    """`auto` under every memory limit of `LIMITS`, per config."""
    tasks = []
    for config in configs:
        for limit in LIMITS:
            fitting = [(r.bubble_rate, name) for name, r in config.reference.items() if r.peak_memory <= limit + EXACT]
            best, name = min(fitting, default=(None, None))
            labels = {"point": f"{AUTO}@{limit:g}", "published": name, "reference": best}
            tasks.append(Task(config, AUTO, options(effort, config.num_ranks, limit), labels))
    return tasks


SECTIONS = {"points": point_tasks, "auto": auto_tasks}


def shown(row: Row) -> str:
    """One row as a line."""
    config = f"row {row['row']} ({row['model']}), " if row["model"] else ""
    rates = [f"{key} {row[key]:.4f}" for key in ("ours", "bound", "reference") if row.get(key) is not None]
    return f"{config}p={row['p']}, m={row['m']}, {row['point']}: {', '.join(rates)}, {row['seconds']:.1f} s"


def not_above(row: Row) -> bool:
    """Whether our rate is at most the published one, in four decimals."""
    return bool(round(row["ours"], 4) <= round(row["reference"], 4) + EXACT)


def at_bound(row: Row) -> bool:
    """Whether our rate is the lower bound, in four decimals."""
    return bool(round(row["ours"], 4) <= round(row["bound"], 4) + EXACT)


def summary(rows: Sequence[Row]) -> list[str]:
    """One line of the table per point: all configs together."""
    lines = []
    for name in dict.fromkeys(row["point"] for row in rows):
        own = [row for row in rows if row["point"] == name]
        against = [row for row in own if row["reference"] is not None]
        ratios = [round(row["ours"], 4) / row["reference"] for row in against if row["reference"]]
        published = sorted({row["published"] for row in against})
        cells = [name, published[0] if len(published) == 1 else "the best that fits", mean_and_range(ratios) if ratios else "-"]
        cells += [f"{sum(map(not_above, against))} of {len(against)}", f"{sum(map(at_bound, own))} of {len(own)}"]
        cells += [mean_and_range([100 * row["gap"] for row in own]), f"{statistics.median(row['seconds'] for row in own):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def findings(sections: dict[str, list[Row]]) -> list[str]:
    """What the table does not show, one sentence per finding."""
    points, auto = (sections.get(name, []) for name in SECTIONS)
    above = [row for row in (*points, *auto) if row["reference"] is not None and not not_above(row)]
    found = [f"Above the published rate: {shown(row)}." for row in above]
    pairs = [(a, b) for a, b in pairwise(auto) if a["row"] == b["row"]]
    worse = [(a, b) for a, b in pairs if round(b["ours"], 4) > round(a["ours"], 4)]
    found += [f"`auto` finds less with more memory: {shown(b)}, and {a['ours']:.4f} at {a['point']}." for a, b in worse]
    return [f"- {line}" for line in found]


INTRODUCTION = """\
# What the planner finds

Bubble rates (idle share of the span) of our plans on the 21 sets of times in
[published.json](data/published.json) (arXiv 2401.10241, tables 8 and 9), next to what a reference scheduler
reaches on the same times, and next to a lower bound that no order of that placement and memory can beat
([ADR 39](../adr/0039-lower-bounds.md)). `zb@1` is the schedule `zb` at the activation memory of 1F1B's rank 0; v-half
and v-min have at most the memory of their namesakes, 0.53 to 0.63 and 0.38 to 0.5. `auto@1` takes the best schedule
within a limit. Mean over the rows, smallest to largest in parentheses; rates are compared with four decimals, as
published.
"""


def markdown(report: Row) -> str:
    """The report as a page: one table, findings, and where the rest is."""
    sections = report["sections"]
    heads = ("plan", "against", "our bubble over theirs", "not above it", "at the bound", "span above the bound, %", "seconds")
    rows = [*sections.get("points", []), *sections.get("auto", [])]
    lines = [INTRODUCTION, *markdown_table(heads, []), *summary(rows), "", *findings(sections), ""]
    lines += ["Every plan is a row of [planner.json](data/planner.json):", "", "```", report["command"], "```", ""]
    made = ", ".join(f"{key} {value}" for key, value in report.items() if key not in ("format", "command", "sections"))
    lines += [f"Rates are the same on every machine, seconds (medians) are not. Made with: {made}.", ""]
    return wrapped("\n".join(lines))


def measured(args: argparse.Namespace) -> Row:
    """Run both sections and return the report."""
    if args.jobs < 1:
        raise PlanError("--jobs must be 1 or more")
    configs, sections = read_configs(args.file, args.rows), dict[str, list[Row]]()
    for name, tasks in SECTIONS.items():
        rows = sections[name] = []
        for row in measured_all(tasks(configs, args.effort), args.jobs):
            print(f"{name}, {shown(row)}", flush=True)
            rows.append(row)
    return {"command": args.command} | origin() | {"sections": sections}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.planner", description=__doc__, formatter_class=raw)
    parser.add_argument("file", nargs="?", type=Path, default=PUBLISHED, help="configs (default: %(default)s)")
    parser.add_argument("--rows", help="configs, counted from 0 and separated by commas (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes; more than there are cores distorts seconds (default 1)")
    efforts = [effort.value for effort in Effort]
    parser.add_argument("--effort", choices=efforts, help="default: default, and max beyond 16 ranks")
    return run_report(parser, argv, FORMAT, measured, markdown)


if __name__ == "__main__":
    sys.exit(main())
