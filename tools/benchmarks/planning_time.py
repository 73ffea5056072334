"""Time the planner's default effort: on one core, on all of them, and against twice as much of it.

Every case is planned three times: with the default effort on one core, with the same on all cores (the plan must be the same),
and with twice as many op evaluations, which shows what a longer search would find.

  python -m tools.benchmarks.planning_time --json docs/benchmarks/data/planning_time.json
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from functools import partial

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.machine import usable_cores
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.planner import Result, make_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from tools.benchmarks.reports import Row, markdown_table, write_json

FORMAT = "zerobubble-planning-time/2"
CASES = (
    *(("zbv", 16, 64, limit) for limit in (1.0, 0.75)),
    ("v-min", 16, 64, 0.375),
    ("zb", 16, 64, 1.5),
    ("auto", 16, 64, 1.0),
    ("zbv", 32, 256, 0.75),
    ("auto", 32, 256, 1.0),
    ("zbv", 64, 512, 0.75),
)
"""Schedule, p, m, memory limit."""
COSTS_OF = partial(
    CostModel.uniform, forward_ms=29.718, backward_ms=29.444, wgrad_ms=19.927, comm_ms=0.527, activation_after_backward=0.4324
)
"""The 6.2B model of arXiv 2401.10241, table 9."""


def measured(case: tuple[str, int, int, float], workers: int) -> Row:
    """Seconds and span of one case."""
    schedule, p, m, limit = case

    def timed(budget: float, workers: int) -> tuple[float, Result]:
        options = SearchOptions(memory_limit=limit, budget=budget, workers=workers)
        begin = time.perf_counter()
        found = make_plan(schedule, num_ranks=p, num_microbatches=m, costs_of=COSTS_OF, options=options)
        return time.perf_counter() - begin, found

    one, result = timed(Effort.DEFAULT.budget, 1)
    several, same = timed(Effort.DEFAULT.budget, workers)
    longer, other = timed(2 * Effort.DEFAULT.budget, 1)
    assert same.simulation.plan == result.simulation.plan, "the plan depends on the number of workers"
    return {
        "schedule": schedule,
        "p": p,
        "m": m,
        "limit": limit,
        "seconds": one,
        "seconds_on_all_cores": several,
        "seconds_with_twice_the_effort": longer,
        "span_ms": result.simulation.span_ms,
        "span_ms_of_twice_the_effort": other.simulation.span_ms,
        "gap": result.bound.gap(result.simulation.span_ms),
    }


def table(report: Row) -> list[str]:
    """The report as a Markdown table."""
    heads = ("schedule", "p", "m", "memory", "seconds, one core", "all cores", "twice the effort", "span over that", "gap")
    lines = []
    for row in report["rows"]:
        cells = [*(str(row[name]) for name in ("schedule", "p", "m", "limit"))]
        cells += [f"{row[f'seconds{name}']:.1f}" for name in ("", "_on_all_cores", "_with_twice_the_effort")]
        cells += [f"{row['span_ms'] / row['span_ms_of_twice_the_effort']:.4f}", f"{max(0.0, 100 * row['gap']):.2f} %"]
        lines.append(cells)
    return [f"{report['machine']}, {report['workers']} cores.", "", *markdown_table(heads, lines)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser(prog="python -m tools.benchmarks.planning_time", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help=f"cases, counted from 0 to {len(CASES) - 1} and separated by commas (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    args = parser.parse_args(argv)
    cases = CASES if args.cases is None else [CASES[int(word)] for word in args.cases.split(",")]
    workers = usable_cores()
    rows = [measured(case, workers) for case in track(cases, "cases")]
    report = {"format": FORMAT, "machine": platform.machine(), "workers": workers, "rows": rows}
    if args.json:
        write_json(report, args.json)
    print(*table(report), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
