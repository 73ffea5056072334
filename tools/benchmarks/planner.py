"""Benchmark the planner: bubble rates against published ones and against its own lower bounds, and the planning time.

It prints one line per plan. Bubble rates are compared as published, with four decimals.

  points   published schedules at their memory; zbv between and beyond
  auto     the best within a memory limit, against the best published schedule that fits
  ideal    F=B=W and free links: the bubble vanishes

examples:
  python -m tools.benchmarks.planner --jobs 2 --json docs/benchmarks/data/planner.json --markdown docs/benchmarks/planner.md
  python -m tools.benchmarks.planner --sections points --rows 0,19 --effort fast
  python -m tools.benchmarks.planner --from-json docs/benchmarks/data/planner.json --markdown docs/benchmarks/planner.md
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import PlanError, UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import AUTO, make_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from tools.benchmarks.published_times import Config, read_configs
from tools.benchmarks.reports import PUBLISHED, Row, markdown_table, mean_and_range, origin, read_json, write_json
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


class Settings(NamedTuple):
    """Search effort, points, and the numbers of ranks of the last section."""

    effort: str | None = None
    points: tuple[Point, ...] = POINTS
    budget: float | None = None
    ideal: tuple[int, ...] = (4, 8, 16, 32)

    def options(self, num_ranks: int, memory_limit: float) -> SearchOptions:
        """Search options for p ranks under a memory limit."""
        effort = Effort(self.effort or ("max" if num_ranks > 16 else "default"))
        budget = effort.budget if self.budget is None else self.budget
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


def measured(tasks: Sequence[Task], jobs: int) -> Iterator[Row]:
    """Measure all tasks, in `jobs` processes; the rows come in order."""
    if jobs == 1:
        yield from map(measure, tasks)
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            yield from pool.imap(measure, tasks)


def point_tasks(configs: Iterable[Config], settings: Settings) -> list[Task]:
    """Every point of every config that has its published schedule."""
    tasks = []
    for config in configs:
        for point in (point for point in settings.points if point.published in config.reference):
            reference = config.reference[point.published]
            limit = max(point.memory, reference.peak_memory) if point.at_peak else point.memory
            labels = {"point": point.name, "published": point.published, "reference": reference.bubble_rate}
            tasks.append(Task(config, point.schedule, settings.options(config.num_ranks, limit), labels))
    return tasks


def auto_tasks(configs: Iterable[Config], settings: Settings) -> list[Task]:
    """`auto` under every memory limit of `LIMITS`, per config."""
    tasks = []
    for config in configs:
        for limit in LIMITS:
            fitting = [(r.bubble_rate, name) for name, r in config.reference.items() if r.peak_memory <= limit + EXACT]
            best, name = min(fitting, default=(None, None))
            labels = {"point": f"{AUTO}@{limit:g}", "published": name, "reference": best}
            tasks.append(Task(config, AUTO, settings.options(config.num_ranks, limit), labels))
    return tasks


def ideal_tasks(configs: Iterable[Config], settings: Settings) -> list[Task]:
    """zbv at 1F1B's memory and zb at twice that, with the default costs: F=B=W=1 and free links."""
    return [
        Task(Config(0, "", p, m, CostModel.uniform, {}), name, settings.options(p, limit), {"point": f"{name}@{limit:g}"})
        for p in settings.ideal
        for m in (2 * p, 3 * p)
        for name, limit in (("zbv", 1.0), ("zb", 2.0))
    ]


SECTIONS: dict[str, Callable[[list[Config], Settings], list[Task]]] = {
    "points": point_tasks,
    "auto": auto_tasks,
    "ideal": ideal_tasks,
}


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
    points, auto, ideal = (sections.get(name, []) for name in SECTIONS)
    above = [row for row in (*points, *auto) if row["reference"] is not None and not not_above(row)]
    found = [f"Above the published rate: {shown(row)}." for row in above]
    pairs = [(a, b) for a, b in pairwise(auto) if a["row"] == b["row"]]
    worse = [(a, b) for a, b in pairs if round(b["ours"], 4) > round(a["ours"], 4)]
    found += [f"`auto` finds less with more memory: {shown(b)}, and {a['ours']:.4f} at {a['point']}." for a, b in worse]
    if ideal:
        none = sum(row["ours"] <= EXACT for row in ideal)
        found.append(f"F=B=W, free links, zbv at 1F1B's memory, zb at twice that: {none} of {len(ideal)} plans have no bubble.")
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


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.planner", description=__doc__, formatter_class=raw)
    parser.add_argument("file", nargs="?", type=Path, default=PUBLISHED, help="configs (default: %(default)s)")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="sections, separated by commas (default: %(default)s)")
    parser.add_argument("--rows", help="configs, counted from 0 and separated by commas (default: all)")
    names = ",".join(point.name for point in POINTS)
    parser.add_argument("--points", default=names, help="points of the first section, separated by commas (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes; more than there are cores distorts seconds (default 1)")
    efforts = [effort.value for effort in Effort]
    parser.add_argument("--effort", choices=efforts, help="default: default, and max beyond 16 ranks")
    parser.add_argument("--budget", type=float, help="op evaluations of a search, instead of any effort")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; rewritten after every section")
    parser.add_argument("--markdown", metavar="FILE", help="write the result as Markdown")
    parser.add_argument("--from-json", metavar="FILE", help="measure nothing: read a result from this file and write --markdown")
    return parser


def run(args: argparse.Namespace, command: str, settings: Settings) -> Row:
    """Run the chosen sections and return the report."""
    names, points = args.sections.split(","), {point.name: point for point in POINTS}
    for option, words, known in (("--sections", names, SECTIONS), ("--points", args.points.split(","), points)):
        if not set(words) <= set(known):
            raise PlanError(f"{option} is {','.join(words)!r}; choose from {','.join(known)}")
    settings = settings._replace(points=tuple(points[name] for name in args.points.split(",")))
    configs = read_configs(args.file, args.rows)
    for target in filter(None, (args.json, args.markdown)):
        Path(target).open("a").close()  # an unwritable path fails now, not after hours
    report: Row = {"format": FORMAT, "command": command} | origin()
    report |= {"sections": {}}
    for name in names:
        rows = report["sections"][name] = []
        for row in measured(SECTIONS[name](configs, settings), args.jobs):
            print(f"{name}, {shown(row)}", flush=True)
            rows.append(row)
        if args.json:
            write_json(report, args.json)
    return report


def main(argv: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Run the benchmark and return the exit code, 2 after a user error, which is reported in one line on stderr."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    args = parser.parse_args(words)
    if args.jobs < 1 or not (args.budget is None or args.budget >= 0):
        parser.error("--jobs must be 1 or more and --budget 0 or more")
    if args.from_json and not args.markdown:
        parser.error("--from-json takes --markdown")
    settings = (settings or Settings())._replace(effort=args.effort, budget=args.budget)
    try:
        command = shlex.join(["python", "-m", "tools.benchmarks.planner", *words])
        report = read_json(args.from_json, FORMAT) if args.from_json else run(args, command, settings)
        if args.markdown:
            Path(args.markdown).write_text(markdown(report), encoding="utf-8")
    except (UserError, OSError, UnicodeDecodeError) as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
