"""Benchmark the planner: bubble rates against published ones and against its own lower bounds, and the planning time.

It prints one line per plan. Bubble rates are compared as published, with four decimals. A missed target is reported and does not
change the exit code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.published import Config, read_configs
from megatron.zerobubble.errors import PlanError, UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.planner import AUTO, CostsOf, bound_of, make_plan
from megatron.zerobubble.plan.search.core import PythonCore
from megatron.zerobubble.plan.search.search import best_core
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.version import __version__

FORMAT = "zerobubble-planner-benchmark/1"
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "benchmarks" / "data" / "published.json"
EXAMPLES = """examples:
  python -m tools.benchmarks.planner --jobs 2 --json docs/benchmarks/data/planner.json --markdown docs/benchmarks/planner.md
  python -m tools.benchmarks.planner --sections points,fast --rows 0,19 --effort fast
  python -m tools.benchmarks.planner --from-json docs/benchmarks/data/planner.json --markdown docs/benchmarks/planner.md
"""

Row = dict[str, Any]
"""One plan as in the JSON: the request and the result. Also used for the other objects of the report."""

LIMITS, EXACT = (0.5, 0.625, 0.75, 1.0, 1.25, 1.5, 2.0), 1e-9


class Point(NamedTuple):
    """A schedule at a memory limit, compared with a published one, and a target.

    With `at_peak`, the limit is at least the peak memory of the published schedule.
    """

    name: str
    schedule: str
    memory: float
    published: str
    at_peak: bool = False
    most_ratio: float | None = None
    """Target for the mean ratio of our bubble rate to the published one."""
    most_gap: float | None = None
    """Target for every gap between our span and its lower bound, as a share of the bound."""


POINTS = (
    Point("zb@1", "zb", 1.0, "ZB-1p", most_gap=0.01),
    Point("zb@2", "zb", 2.0, "ZB-2p", at_peak=True, most_gap=0.01),
    Point("zbv@1", "zbv", 1.0, "ZBV", most_gap=0.01),
    Point("v-half", "v-half", 0.0, "V-half", at_peak=True, most_gap=0.01),
    Point("v-min", "v-min", 0.0, "V-min", at_peak=True, most_ratio=0.95, most_gap=0.05),
    Point("zbv@0.75", "zbv", 0.75, "V-half", most_ratio=0.82),
    Point("zbv@1.25", "zbv", 1.25, "ZBV", most_ratio=0.55, most_gap=0.01),
)
PAIRED = POINTS[:5]  # at the memory of the published schedule; the others lie between and beyond


class Settings(NamedTuple):
    """Search effort, points, and the sizes of the last three sections: p, (p, m) with one config each, (p, m)."""

    effort: str | None = None
    points: tuple[Point, ...] = POINTS
    budget: float | None = None
    seed: int = 0
    ideal: tuple[int, ...] = (4, 8, 16, 32)
    uneven: tuple[tuple[int, int], ...] = ((8, 24), (16, 48))
    fast: tuple[tuple[int, int], ...] = ((32, 256),)

    def options(self, num_ranks: int, memory_limit: float) -> SearchOptions:
        """Search options for p ranks under a memory limit."""
        effort = Effort(self.effort or ("max" if num_ranks > 16 else "default"))
        return SearchOptions(
            memory_limit=memory_limit, seed=self.seed, budget=effort.budget if self.budget is None else self.budget
        )


class Task(NamedTuple):
    """One plan of a section to measure. Picklable, for other processes."""

    config: Config
    schedule: str
    options: SearchOptions
    labels: Row
    rival_costs_of: CostsOf | None = None
    """Also plan for these costs, and simulate that plan under the config's costs."""


def measure(task: Task) -> Row:
    """Plan and measure; `seconds` is the time from the request to the simulated plan and its lower bound."""
    config, options = task.config, task.options
    p, m = config.num_ranks, config.num_microbatches
    begin = time.perf_counter()
    result = make_plan(task.schedule, num_ranks=p, num_microbatches=m, costs_of=config.costs_of, options=options)
    seconds = time.perf_counter() - begin
    simulation = result.simulation
    row: Row = {"row": config.row, "model": config.model, "p": p, "m": m, "limit": options.memory_limit} | task.labels
    row |= {"schedule": result.name, "ours": simulation.bubble_rate, "bound": result.bound.bubble_rate}
    row["gap"] = rounded(result.bound.gap(simulation.span_ms))
    row["seconds"] = round(seconds, 3)
    if row.get("reference"):
        row["ratio"] = round(row["ours"], 4) / row["reference"]
    if task.rival_costs_of is not None:
        rival = make_plan(task.schedule, num_ranks=p, num_microbatches=m, costs_of=task.rival_costs_of, options=options)
        plan = rival.simulation.plan
        row["flattened"] = simulate(plan, config.costs_of(plan.placement)).bubble_rate
    return row


def bounded(row: Row, task: Task) -> Row:
    """A measured row with its lower bound computed anew."""
    config = task.config
    bound = bound_of(
        task.schedule,
        num_ranks=config.num_ranks,
        num_microbatches=config.num_microbatches,
        costs_of=config.costs_of,
        options=task.options,
    )
    return row | {"bound": bound.bubble_rate, "gap": rounded((1 - bound.bubble_rate) / (1 - row["ours"]) - 1)}


def rounded(gap: float) -> float:
    """A gap without the rounding errors that make a plan at its bound seem to be below it."""
    return round(gap, 7) + 0.0


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


def uneven(costs_of: CostsOf, placement: Placement, *, flat: bool = False) -> CostModel:
    """Costs with a short first stage (embedding), a long last one (head) and noise; with `flat`, their mean on every stage."""
    costs, random = costs_of(placement), Random(0)
    shares = [random.uniform(0.9, 1.1) for _ in range(placement.num_stages)]
    shares[0] *= 0.8
    shares[-1] *= 1.4
    times: dict[str, Any] = {}
    for name in ("forward_ms", "backward_ms", "wgrad_ms"):
        true = tuple(value * share for value, share in zip(getattr(costs, name), shares, strict=True))
        times[name] = (statistics.fmean(true),) * len(true) if flat else true
    return replace(costs, **times)


def uneven_tasks(configs: Iterable[Config], settings: Settings) -> list[Task]:
    """Planning for uneven times against planning for their mean."""
    tasks = []
    for size in settings.uneven:
        those = [config for config in configs if (config.num_ranks, config.num_microbatches) == size]
        chosen = settings._replace(points=(PAIRED[0], PAIRED[2], PAIRED[3]))
        for config, schedule, options, labels, _ in point_tasks(those[:1], chosen):
            true, flat = partial(uneven, config.costs_of), partial(uneven, config.costs_of, flat=True)
            tasks.append(Task(config._replace(costs_of=true), schedule, options, {"point": labels["point"]}, flat))
    return tasks


def fast_tasks(configs: Iterable[Config], settings: Settings) -> list[Task]:
    """Effort `fast` on the largest instances."""
    chosen = [config for config in configs if (config.num_ranks, config.num_microbatches) in settings.fast]
    return point_tasks(chosen, settings._replace(effort="fast", points=PAIRED))


def describe(row: Row) -> str:
    """One row as a short text."""
    config = f"row {row['row']} ({row['model']}), " if row["model"] else ""
    shown = [f"{key} {row[key]:.4f}" for key in ("ours", "reference", "flattened") if row.get(key) is not None]
    return f"{config}p={row['p']}, m={row['m']}, {row['point']}: {', '.join(shown)}, {row['seconds']:.1f} s"


def verdict(target: str, rows: Sequence[Row], keeps: Callable[[Row], bool]) -> list[Row]:
    """Whether every row meets a target, with the rows that miss it; empty without rows."""
    misses = [describe(row) for row in rows if not keeps(row)]
    result = f"{len(rows) - len(misses)} of {len(rows)}"
    return [{"target": target, "result": result, "met": not misses, "misses": misses}] if rows else []


def not_above(row: Row, most: float = 1.0) -> bool:
    """Whether our rate is at most `most` times the published one, in four decimals; true without a published one."""
    return row["reference"] is None or bool(round(row["ours"], 4) <= most * round(row["reference"], 4) + EXACT)


def below_or_at_bound(row: Row) -> bool:
    """Whether our rate is below the published one, in four decimals, or the lower bound does not allow that."""
    return bool(round(row["ours"], 4) < row["reference"] - EXACT or round(row["bound"], 4) >= row["reference"] - EXACT)


def within_gap(point: Point, row: Row) -> bool:
    """Whether a row's span is as near to its lower bound as its point asks for."""
    return point.most_gap is None or bool(row["gap"] <= point.most_gap + EXACT)


def judge_points(rows: Sequence[Row]) -> list[Row]:
    """Verdicts on each point over all configs, and on the mean ratios."""
    verdicts = []
    for point in POINTS:
        those = [row for row in rows if row["point"] == point.name]
        ratios = [row["ratio"] for row in those if "ratio" in row]
        if point in PAIRED:
            verdicts += verdict(f"{point.name} never above {point.published}", those, not_above)
        if point in PAIRED[:3]:
            verdicts += verdict(f"{point.name} below {point.published} wherever the bound allows", those, below_or_at_bound)
        if ratios and point.most_ratio is not None:
            target = f"{point.name}: mean ratio to {point.published} at most {point.most_ratio}"
            mean = statistics.fmean(ratios)
            verdicts.append({"target": target, "result": f"{mean:.3f}", "met": mean <= point.most_ratio, "misses": []})
        if point.most_gap is not None:
            gaps = [row for row in those if "gap" in row]
            verdicts += verdict(
                f"{point.name}: span at most {point.most_gap:.0%} above its bound", gaps, partial(within_gap, point)
            )
    return verdicts


def judge_auto(rows: Sequence[Row]) -> list[Row]:
    """Verdicts on `auto` against the published schedules, and against `auto` under the next smaller limit."""
    grown = [(a, b) for a, b in pairwise(rows) if a["row"] == b["row"] and a["limit"] < b["limit"]]
    rising = [more for less, more in grown if round(more["ours"], 4) > round(less["ours"], 4)]
    better = verdict("never worse than the best published schedule that fits", rows, not_above)
    return better + verdict("never rises with memory", rows, lambda row: row not in rising)


class Section(NamedTuple):
    """A part of the benchmark: a line about it, its columns, its tasks and its verdicts."""

    about: str
    columns: str
    tasks: Callable[[list[Config], Settings], list[Task]]
    judge: Callable[[Sequence[Row]], list[Row]]


COLUMNS = {"row": (3, ""), "model": (6, ""), "p": (3, ""), "m": (4, ""), "point": (10, ""), "schedule": (16, "")}
COLUMNS |= dict.fromkeys(("limit", "reference", "ours", "bound", "flattened"), (9, ".4f"))
COLUMNS |= {"published": (9, ""), "ratio": (6, ".3f"), "gap": (7, ".2%"), "seconds": (8, ".1f")}
"""Width and format of each column."""
REQUEST = ("row", "model", "p", "m", "point", "limit", "bound")
"""Keys of every row of the JSON, also where its section does not show them."""
CONFIG = "row model p m point limit"
COMPARED = f"{CONFIG} published reference ours bound gap ratio seconds"
CHOSEN = f"{CONFIG} published reference schedule ours bound seconds"

SECTIONS = {
    "points": Section("published schedules at their memory; zbv between and beyond", COMPARED, point_tasks, judge_points),
    "auto": Section("the best within a memory limit, against the best published", CHOSEN, auto_tasks, judge_auto),
    "ideal": Section(
        *("F=B=W and free links: the bubble vanishes", "p m point limit ours seconds", ideal_tasks),
        lambda rows: verdict("no bubble", rows, lambda row: row["ours"] <= EXACT),
    ),
    "uneven": Section(
        "planned for a short first stage, a long last one and noise, against planned for their mean (flattened)",
        *(f"{CONFIG} flattened ours bound seconds", uneven_tasks),
        lambda rows: verdict("true times never worse", rows, lambda row: row["ours"] <= row["flattened"] + EXACT),
    ),
    "fast": Section(
        *("effort fast on large instances, one plan at a time, wall clock", COMPARED, fast_tasks),
        lambda rows: [
            *verdict("at most 5 s a plan", rows, lambda row: row["seconds"] <= 5),
            *verdict("at most 1.10 of the published rate", rows, lambda row: not_above(row, 1.1)),
        ],
    ),
}
INTRODUCTION = """\
Bubble rates (idle share of the span) of our plans, next to what a reference scheduler (published, reference) reaches on the same
times (`data/published.json`: arXiv 2401.10241, tables 8 and 9), and next to a lower bound that no order of that
placement and memory can beat ([ADR 39](../adr/0039-lower-bounds.md)). Memory (limit) is activation memory, 1.0 is 1F1B's rank 0;
`ratio` is ours over the reference, `gap` is how far our span is above its bound: the optimum lies in between. Rates are compared
with four decimals, as published."""


def cell(row: Row, key: str) -> str:
    """One value as text, `-` if it is missing."""
    return "-" if row.get(key) is None else f"{row[key]:{COLUMNS[key][1]}}"


def run_section(name: str, configs: list[Config], settings: Settings, jobs: int) -> Row:
    """Measure and print one section; returns its part of the report."""
    section = SECTIONS[name]
    keys = section.columns.split()
    print(f"\n{name}: {section.about}", " ".join(f"{key:>{COLUMNS[key][0]}}" for key in keys), sep="\n", flush=True)
    rows = []
    for row in (recorded(name, each) for each in measured(section.tasks(configs, settings), 1 if name == "fast" else jobs)):
        print(" ".join(f"{cell(row, key):>{COLUMNS[key][0]}}" for key in keys), flush=True)
        rows.append(row)
    return {"rows": rows, "verdicts": section.judge(rows)}


def recorded(name: str, row: Row) -> Row:
    """A row of a section as in the JSON: its request and its columns, results with nine decimals."""
    shown = {key: row[key] for key in row if key in {*REQUEST, *SECTIONS[name].columns.split()}}
    return {key: round(value, 9) if isinstance(value, float) and key != "limit" else value for key, value in shown.items()}


def rebound(report: Row, configs: list[Config], settings: Settings) -> Row:
    """A report with the lower bounds of its rows computed anew, and its targets judged by them."""
    sections = {}
    for name, section in report["sections"].items():
        tasks = {
            (task.config.row, task.config.num_ranks, task.config.num_microbatches, task.labels["point"]): task
            for task in SECTIONS[name].tasks(configs, settings)
        }
        keys = [(row["row"], row["p"], row["m"], row["point"]) for row in section["rows"]]
        rows = [
            recorded(name, bounded(row, tasks[key])) if key in tasks else row
            for key, row in zip(keys, section["rows"], strict=True)
        ]
        sections[name] = {"rows": rows, "verdicts": SECTIONS[name].judge(rows)}
    return report | {"bounds": f"{datetime.now(UTC):%Y-%m-%d}", "sections": sections}


def missed(report: Row) -> list[str]:
    """Every target that was not reached, with the rows that missed it."""
    verdicts = [(name, v) for name, section in report["sections"].items() for v in section["verdicts"]]
    return [f"missed: {name}, {v['target']}: {'; '.join([v['result'], *v['misses']])}" for name, v in verdicts if not v["met"]]


def table(lines: Iterable[Iterable[str]], heads: Sequence[str]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)]


def markdown(report: Row) -> str:
    """The report as Markdown."""
    verdicts = [(name, v) for name, section in report["sections"].items() for v in section["verdicts"]]
    shown = [(name, v["target"], v["result"], "yes" if v["met"] else "**missed**") for name, v in verdicts]
    lines = ["# What the planner finds", "", INTRODUCTION, "", "## Targets", ""]
    lines += table(shown, ["section", "target", "result", "met"])
    lines += ["", *([f"- {line}" for line in missed(report)] or ["No target was missed."])]
    for name, section in report["sections"].items():
        keys = SECTIONS[name].columns.split()
        cells = [[cell(row, key) for key in keys] for row in section["rows"]]
        lines += ["", f"## {name}", "", SECTIONS[name].about, "", *table(cells, keys)]
    made = ", ".join(f"{key} {value}" for key, value in report.items() if key not in ("format", "command", "sections"))
    note = f"Rates are the same on every machine, seconds are not. This file is rendered from the JSON of that run: {made}."
    return "\n".join([*lines, "", "## How to reproduce", "", "```", report["command"], "```", "", note, ""])


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    sections = "sections:\n" + "".join(f"  {name:8}{section.about}\n" for name, section in SECTIONS.items())
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="python -m tools.benchmarks.planner", description=__doc__, epilog=f"{sections}\n{EXAMPLES}", formatter_class=raw
    )
    parser.add_argument(
        "file", nargs="?", default=PUBLISHED, help="configs, as for `zerobubble compare` (default: the published)"
    )
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="sections to run, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--rows", help="configs, counted from 0 and separated by commas (default: all)")
    names = ",".join(point.name for point in POINTS)
    parser.add_argument("--points", default=names, help="points of the first section, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes (default %(default)s); more than the number of cores distorts seconds"
    )
    efforts = [effort.value for effort in Effort]
    parser.add_argument("--effort", choices=efforts, help="default: default, and max beyond 16 ranks; fast is always fast")
    parser.add_argument("--budget", type=float, help="op evaluations of a search, instead of any effort")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the search (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; rewritten after every section")
    parser.add_argument("--markdown", metavar="FILE", help="write the result as Markdown")
    parser.add_argument("--from-json", metavar="FILE", help="measure nothing: read a result from this file and write --markdown")
    parser.add_argument("--bounds", action="store_true", help="with --from-json: compute the lower bounds of its rows anew")
    return parser


def run(args: argparse.Namespace, command: str, settings: Settings) -> Row:
    """Run the chosen sections and return the report."""
    names = args.sections.split(",")
    if not set(names) <= set(SECTIONS):
        raise PlanError(f"--sections is {args.sections!r}; choose from {','.join(SECTIONS)}")
    points = {point.name: point for point in POINTS}
    if not set(args.points.split(",")) <= set(points):
        raise PlanError(f"--points is {args.points!r}; choose from {','.join(points)}")
    settings = settings._replace(points=tuple(points[name] for name in args.points.split(",")))
    configs = read_configs(str(args.file), args.rows)
    for target in filter(None, (args.json, args.markdown)):
        Path(target).open("a").close()  # an unwritable path fails now, not after hours
    report: Row = {"format": FORMAT, "command": command, "date": f"{datetime.now(UTC):%Y-%m-%d}", "version": __version__}
    report |= {"python": platform.python_version(), "core": "pure Python" if best_core() is PythonCore else "compiled"}
    report |= {"machine": f"{platform.machine()} with {os.cpu_count()} CPUs", "sections": {}}
    for name in names:
        report["sections"][name] = run_section(name, configs, settings, args.jobs)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def read_report(file: str) -> Row:
    """Read a report that `--json` wrote. Raises PlanError on any other file."""
    try:
        report = json.loads(Path(file).read_text(encoding="utf-8"))
        if report["format"] == FORMAT and set(report["sections"]) <= set(SECTIONS):
            return dict(report)
    except (ValueError, LookupError, TypeError):
        pass
    raise PlanError(f"{file} was not written by --json of this tool (format {FORMAT})")


def main(argv: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Run the benchmark and return the exit code, 2 after a user error, which is reported in one line on stderr."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    args = parser.parse_args(words)
    if args.jobs < 1 or not (args.budget is None or args.budget >= 0):
        parser.error("--jobs must be 1 or more and --budget 0 or more")
    if args.from_json and not args.markdown:
        parser.error("--from-json takes --markdown")
    if args.bounds and not args.from_json:
        parser.error("--bounds takes --from-json")
    settings = (settings or Settings())._replace(effort=args.effort, budget=args.budget, seed=args.seed)
    try:
        command = shlex.join(["python", "-m", "tools.benchmarks.planner", *words])
        report = read_report(args.from_json) if args.from_json else run(args, command, settings)
        if args.bounds:
            report = rebound(report, read_configs(str(args.file), None), settings)
            if args.json:
                Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if args.markdown:
            Path(args.markdown).write_text(markdown(report), encoding="utf-8")
    except (UserError, OSError, UnicodeDecodeError) as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("", *(missed(report) or ["no target was missed"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
