"""Simulate schedules with microbatches of unequal length, and on links of unequal speed.

For every number of ranks p, with m = 3p microbatches, and every distribution of lengths, a number of batches is drawn. Each
contender runs the same batches in the simulator; F=B=W per rank at the mean length, free links. *Idle* is the share of the
makespan in which ranks do not compute, *speed-up* the ratio of makespans (iteration time with the synchronous optimizer), both as
means over the batches with 95 % confidence intervals; *memory* is the mean of the peaks, 1.0 being p microbatches of the mean
length on a rank.

  1f1b, interleaved, zbv  in the order in which the data comes, or sorted by length, in the better of both directions
  zbv assigned            microbatches assigned to the slots of ZBV, its order kept
  zbv planned             assigned, and the order searched for these lengths: what `MicrobatchPlanner` does per iteration. It may
                          use the memory of ZBV sorted by length, about that of 1F1B sorted by length.

Lengths are log-normal with coefficients of variation of 0.3, 0.6 and 1.0, where costs are in proportion to the tokens; and those
of the files of Python's standard library as documents, at 4 bytes per token and cut at 8,192 tokens, with 10 % of F in attention
at the mean length, which grows with the square.

The links: equal microbatches with F=B=W=1 and 0.05 ms per message, except in both directions between the two ranks in the middle,
where a message takes ten times as long. The plan that does not know is made for 0.05 ms everywhere, the one that knows for the
matrix; both run on the matrix.

  python -m tools.benchmarks.unequal --json docs/benchmarks/data/unequal.json --markdown docs/benchmarks/unequal.md
  python -m tools.benchmarks.unequal --from-json docs/benchmarks/data/unequal.json --markdown docs/benchmarks/unequal.md
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import plan_of, schedule_spec
from megatron.zerobubble.plan.search.assign import ITERATION_BUDGET, assign
from megatron.zerobubble.plan.search.core import PythonCore
from megatron.zerobubble.plan.search.search import best_core
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.version import __version__
from tools.benchmarks.reports import Row, markdown_table, run_report
from tools.docs.wrap import wrapped

FORMAT = "zerobubble-unequal-benchmark/1"
LINK_MS, SLOWER = 0.05, 10
LONGEST, BYTES_PER_TOKEN, ATTENTION_SHARE = 8192, 4, 0.1
LINK_CASES = (("zb", 1.0), ("zb", 2.0), ("zbv", 0.75), ("zbv", 1.0), ("v-half", 0.625))


def log_normal(deviation: float) -> Callable[[Random, int], list[int]]:
    """Lengths with a mean of about 4,096 tokens and this coefficient of variation."""
    sigma = math.sqrt(math.log(1 + deviation * deviation))

    def draw(random: Random, m: int) -> list[int]:
        return [max(1, round(4096 * random.lognormvariate(-sigma * sigma / 2, sigma))) for _ in range(m)]

    return draw


@cache
def library_lengths() -> tuple[int, ...]:
    """Tokens of the standard library's files, without its tests."""
    files = []
    for parent, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in ("test", "tests", "site-packages")]
        files += [Path(parent) / name for name in names if name.endswith(".py")]
    sizes = sorted(path.stat().st_size for path in files)
    return tuple(min(LONGEST, size // BYTES_PER_TOKEN) for size in sizes if size >= BYTES_PER_TOKEN)


DISTRIBUTIONS: dict[str, tuple[Callable[[Random, int], list[int]], float]] = {
    "log-normal 0.3": (log_normal(0.3), 0.0),
    "log-normal 0.6": (log_normal(0.6), 0.0),
    "log-normal 1.0": (log_normal(1.0), 0.0),
    "standard library": (lambda random, m: random.choices(library_lengths(), k=m), ATTENTION_SHARE),
}
"""How lengths are drawn, and the share of F in attention."""


def costs_of(plan: Plan, tokens: Sequence[int], attention_share: float) -> CostModel:
    """F=B=W=1 ms per rank at the mean length."""
    mean = statistics.fmean(tokens)
    squares = statistics.fmean(count * count for count in tokens)
    uniform = CostModel.uniform(plan.placement, activation_after_backward=0.5)
    model = LengthModel.of(uniform, tokens=mean, squares=squares, attention_share=attention_share)
    return CostModel.of_microbatches(model.costs(tokens))


def measure(plan: Plan, costs: CostModel) -> Row:
    """What is kept of one simulation."""
    simulation = simulate(plan, costs)
    return {"idle": simulation.idle_share, "makespan": simulation.makespan_ms, "memory": max(simulation.peak_memory)}


def batch(num_ranks: int, tokens: Sequence[int], attention_share: float, options: SearchOptions) -> dict[str, Row]:
    """All contenders on one batch."""
    m, rows = len(tokens), {}
    ascending = tuple(sorted(range(m), key=tokens.__getitem__))
    for label, name in (("1f1b", "1f1b"), ("interleaved", "interleaved-1f1b"), ("zbv", "zbv")):
        plan = plan_of(schedule_spec(name, num_ranks=num_ranks), m)
        costs = costs_of(plan, tokens, attention_share)
        rows[f"{label} as it comes"] = measure(plan, costs)
        both = [measure(replace(plan, assignment=order), costs) for order in (ascending, ascending[::-1])]
        rows[f"{label} sorted"] = min(both, key=lambda row: float(row["makespan"]))
    rows["zbv assigned"] = measure(assign([plan], costs, options, fixed_order=True), costs)
    planner = MicrobatchPlanner(schedule_spec("zbv", num_ranks=num_ranks), m, options=options)
    begin = time.process_time()
    planned = planner.plan(costs_of(plan, tokens, attention_share))
    seconds = time.process_time() - begin
    return rows | {"zbv planned": measure(planned, costs) | {"seconds": seconds}}


def interval(values: Sequence[float]) -> Row:
    """A mean with its 95 % confidence interval."""
    mean, spread = statistics.fmean(values), statistics.pstdev(values)
    reach = statistics.NormalDist().inv_cdf(0.975) * spread / math.sqrt(max(1, len(values) - 1))
    return {"value": mean, "low": mean - reach, "high": mean + reach}


def summarize(batches: Sequence[dict[str, Row]]) -> Row:
    """Means over the batches, with intervals."""
    ours = "zbv planned"
    summary: Row = {}
    for name in batches[0]:
        ratios = [rows[name]["makespan"] / rows[ours]["makespan"] for rows in batches]
        summary[name] = {
            "idle": interval([rows[name]["idle"] for rows in batches]),
            "speedup_of_planned": interval(ratios),
            "least_speedup_of_planned": min(ratios),
            "memory": statistics.fmean(rows[name]["memory"] for rows in batches),
        }
    seconds = sorted(rows[ours]["seconds"] for rows in batches)
    return {"contenders": summary, "seconds": statistics.median(seconds), "most_seconds": seconds[-1]}


def link_rows(num_ranks: int, budget: float) -> list[Row]:
    """Plans that know a slow link in the middle, and plans that do not."""
    middle = {num_ranks // 2 - 1, num_ranks // 2}
    latency = [[LINK_MS * (SLOWER if {a, b} == middle else 1) for b in range(num_ranks)] for a in range(num_ranks)]
    links = Links(latency_ms=tuple(map(tuple, latency)))
    rows = []
    for name, limit in LINK_CASES:
        spec = schedule_spec(name, num_ranks=num_ranks)
        plain = CostModel.uniform(spec.placement, comm_ms=LINK_MS, activation_after_backward=0.5)
        for objective in Objective:
            options = SearchOptions(objective=objective, memory_limit=limit, budget=budget)
            planner = MicrobatchPlanner(spec, 3 * num_ranks, costs=plain, options=options, base_options=options)
            costs = replace(plain, links=links)
            times = [objective.of(simulate(plan, costs)) for plan in (planner.base, planner.plan(costs))]
            rows.append({"p": num_ranks, "schedule": name, "limit": limit, "objective": objective.value})
            rows[-1] |= {"does_not_know_ms": times[0], "knows_ms": times[1], "ratio": times[0] / times[1]}
    return rows


def run(ranks: Sequence[int], draws: int, budget: float, command: str) -> Row:
    """Run the benchmark."""
    options = SearchOptions(objective=Objective.MAKESPAN, budget=budget)
    report: Row = {"command": command, "version": __version__, "python": platform.python_version()}
    report |= {"core": "Python" if best_core() is PythonCore else "compiled", "draws": draws, "budget": budget, "unequal": []}
    for p in track(ranks, "numbers of ranks"):
        for name, (draw, attention_share) in DISTRIBUTIONS.items():
            lengths = [draw(Random(1000 * p + seed), 3 * p) for seed in range(draws)]
            deviation = statistics.fmean(statistics.pstdev(tokens) / statistics.fmean(tokens) for tokens in lengths)
            row = {"p": p, "m": 3 * p, "lengths": name, "deviation": deviation}
            report["unequal"].append(row | summarize([batch(p, tokens, attention_share, options) for tokens in lengths]))
    report["links"] = [row for p in ranks for row in link_rows(p, 6 * budget)]
    return report


def percent(estimate: Row) -> str:
    """An idle share with its interval."""
    return f"{100 * estimate['value']:.1f} ({100 * estimate['low']:.1f} to {100 * estimate['high']:.1f})"


def markdown(report: Row) -> str:
    """The report as Markdown."""
    names = list(report["unequal"][0]["contenders"])
    others = [name for name in names if name != "zbv planned"]
    idle, speed, memory = [], [], []
    for row in report["unequal"]:
        head, contenders = [str(row["p"]), row["lengths"]], row["contenders"]
        ratios = [contenders[name]["speedup_of_planned"] for name in others]
        idle.append([*head, *(percent(contenders[name]["idle"]) for name in names)])
        speed.append([*head, *(f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in ratios)])
        peaks = (f"{contenders[name]['memory']:.2f}" for name in names)
        memory.append(
            [*head, f"{row['deviation']:.2f}", *peaks, f"{1000 * row['seconds']:.0f} ({1000 * row['most_seconds']:.0f})"]
        )
    slow = []
    for row in report["links"]:
        times = (f"{row[key]:.3f}" for key in ("does_not_know_ms", "knows_ms", "ratio"))
        slow.append([str(row["p"]), f"{row['schedule']}@{row['limit']}", row["objective"], *times])
    lines = [
        *("# Unequal microbatches and links", "", introduction(report)),
        *("", "## Idle share of the makespan, %", "", *markdown_table(("p", "lengths", *names), idle)),
        *("", "## Speed of `zbv planned` over the others", "", *markdown_table(("p", "lengths", *others), speed)),
        *("", "## Peak activation memory, and the time to plan", ""),
        *markdown_table(("p", "lengths", "measured deviation", *names, "ms to plan"), memory),
        "",
        "*ms to plan* is the median (and the longest) CPU time from the lengths to the validated plan, on one core "
        f"(Python {report['python']}, {report['core']} core). It differs between machines; the plans do not.",
        *("", "## One link ten times slower", ""),
        *markdown_table(("p", "schedule@memory limit", "objective", "does not know, ms", "knows, ms", "ratio"), slow),
        *("", "## How to reproduce", "", "```", report["command"], "```", ""),
    ]
    return wrapped("\n".join(lines))


def introduction(report: Row) -> str:
    """What the numbers are: this module's docstring as Markdown."""
    text = (__doc__ or "").split("\n\n", 1)[1].split("\n\n  python -m")[0].replace("\n" + " " * 26, " ")
    lines = []
    for line in text.splitlines():
        name, _, meaning = line.strip().partition("  ")
        lines.append(f"- `{name}`: {meaning.strip()}" if line.startswith("  ") else line)
    return "\n".join([f"**Simulated**, {report['draws']} batches per row.", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code, 2 after a user error."""
    prog, about = "python -m tools.benchmarks.unequal", (__doc__ or "").split("\n\n", maxsplit=1)[0]
    parser = Parser(prog=prog, description=about)
    parser.add_argument("--ranks", default="4,8,16", help="numbers of ranks, separated by commas (default %(default)s)")
    parser.add_argument("--draws", type=int, default=40, help="batches per row (default %(default)s)")
    parser.add_argument("--budget", type=float, default=ITERATION_BUDGET, help="op evaluations per plan (default %(default)g)")

    def measured(args: argparse.Namespace) -> Row:
        ranks = [int(word) for word in args.ranks.split(",")]
        if min(ranks) < 2 or args.draws < 1 or args.budget < 0:
            raise PlanError("--ranks must be 2 or more each, --draws 1 or more and --budget 0 or more")
        return run(ranks, args.draws, args.budget, args.command)

    return run_report(parser, argv, FORMAT, measured, markdown)


if __name__ == "__main__":
    sys.exit(main())
