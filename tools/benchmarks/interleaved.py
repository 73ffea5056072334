"""Compare ZBV with interleaved 1F1B on the published times: span, makespan, activation memory, messages.

All of it is simulated. Interleaved 1F1B is the fixed order with 2, 4 and 8 virtual stages (VPP) per rank; ZBV is planned for each
memory limit and each objective. The times of links are the published ones, and multiples of them: interleaving with v virtual
stages sends v times as many messages as 1F1B, a V twice as many.

  python -m tools.benchmarks.interleaved --json docs/benchmarks/data/interleaved.json --markdown docs/benchmarks/interleaved.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.cli.published import Config, read_configs
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import Simulation, simulate

FORMAT = "zerobubble-interleaved-benchmark/1"
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "benchmarks" / "data" / "published.json"
VIRTUAL_STAGES = (2, 4, 8)
LIMITS = (1.0, 0.75)
LINKS = (1.0, 4.0, 16.0)
"""Times of a link, as multiples of the published one."""


def messages(placement: Placement) -> int:
    """Messages of one microbatch, forward and backward, over links between ranks."""
    ranks = placement.stage_to_rank
    return 2 * sum(one != other for one, other in pairwise(ranks))


def compared(config: Config, factor: float, effort: Effort) -> dict[str, Any]:
    """One row: each interleaving, and ZBV for each limit, planned for the makespan and for the span."""

    def costs_of(placement: Placement) -> CostModel:
        costs = config.costs_of(placement)
        return replace(costs, comm_ms=factor * costs.comm_ms)

    p, m = config.num_ranks, config.num_microbatches
    row: dict[str, Any] = {"row": config.row, "model": config.model, "p": p, "m": m, "link": factor}
    for chunks in VIRTUAL_STAGES:
        plan = build_plan("interleaved-1f1b", num_ranks=p, num_microbatches=m, num_chunks=chunks)
        found = simulate(plan, costs_of(plan.placement))
        row[f"v={chunks}"] = _measures(found, found)
    for limit in LIMITS:
        spans, makespans = (
            make_plan(
                "zbv",
                num_ranks=p,
                num_microbatches=m,
                costs_of=costs_of,
                options=SearchOptions(memory_limit=limit, objective=objective, budget=effort.budget),
            ).simulation
            for objective in (Objective.SPAN, Objective.MAKESPAN)
        )
        row[f"zbv@{limit:g}"] = _measures(spans, makespans)
    return row


def _measures(spans: Simulation, makespans: Simulation) -> dict[str, float]:
    """The span of one plan and the makespan of another of the same schedule, their peak memory, and messages."""
    return {
        "span_ms": spans.span_ms,
        "makespan_ms": makespans.makespan_ms,
        "memory": max(*spans.peak_memory, *makespans.peak_memory),
        "messages": messages(spans.plan.placement),
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    rows = report["rows"]
    lines = [*_INTRODUCTION, "", "## Summary", ""]
    lines += [
        f"Over the {len({row['row'] for row in rows})} rows: how many times as fast ZBV is, smallest to largest (mean).",
        "",
        *_head("ZBV at", "links", "interleaved", "makespan", "span", "its memory over theirs", "its messages over theirs"),
    ]
    for limit in LIMITS:
        for factor in LINKS:
            for chunks in VIRTUAL_STAGES:
                own = [(row[f"zbv@{limit:g}"], row[f"v={chunks}"]) for row in rows if row["link"] == factor]
                if not own:
                    continue
                cells = [f"{limit:g} of 1F1B's memory", f"{factor:g} times", f"v = {chunks}"]
                cells += [_range([theirs[key] / ours[key] for ours, theirs in own]) for key in ("makespan_ms", "span_ms")]
                cells += [_range([ours[key] / theirs[key] for ours, theirs in own]) for key in ("memory", "messages")]
                lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_counts(rows)]
    lines += ["", "## Every row", "", "Milliseconds, at the published times of the links. Memory: 1.0 is 1F1B's rank 0.", ""]
    names = [*(f"v={chunks}" for chunks in VIRTUAL_STAGES), *(f"zbv@{limit:g}" for limit in LIMITS)]
    for title, key, digits in (("Makespan", "makespan_ms", 1), ("Span", "span_ms", 1), ("Memory", "memory", 3)):
        lines += [f"### {title}", "", *_head("row", "model", "p", "m", *names)]
        for row in (row for row in rows if row["link"] == 1.0):
            cells = [
                *(str(row[name]) for name in ("row", "model", "p", "m")),
                *(f"{row[name][key]:.{digits}f}" for name in names),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["### Messages per microbatch", "", *_head("p", *names)]
    for p, row in sorted({row["p"]: row for row in rows}.items()):
        lines.append(f"| {p} | {' | '.join(str(row[name]['messages']) for name in names)} |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
# Against interleaved 1F1B

Interleaved 1F1B is what most people run. Here it is next to ZBV on the 21 published sets of profiled times
([published.json](data/published.json): arXiv 2401.10241, tables 8 and 9). Everything is **simulated**; a real run pays what links
and kernels really cost ([Compare with 1F1B](../comparing.md)).

```
python -m tools.benchmarks.interleaved --json docs/benchmarks/data/interleaved.json \\
    --markdown docs/benchmarks/interleaved.md
```

- **Makespan** is the iteration time with the synchronous optimizer, **span** the one with post-validation. ZBV is planned for
  each. Interleaved 1F1B is one order; with megatron-core's optimizer its makespan is what counts.
- **Links**: a message takes the published time, or 4 or 16 times as long. Interleaving with v virtual stages sends about v times
  as many messages as 1F1B, a V a little fewer than v = 2. The simulator delays the op that waits for a message, never the rank
  that sends it.
""".splitlines()


def _range(values: Sequence[float]) -> str:
    if max(values) - min(values) < 0.005:
        return f"{statistics.fmean(values):.2f}"
    return f"{min(values):.2f} to {max(values):.2f} ({statistics.fmean(values):.3f})"


def _counts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of the number of rows on which ZBV is faster, at the published links."""
    own = [row for row in rows if row["link"] == 1.0]
    lines = [f"On how many of the {len(own)} rows ZBV is faster, at the published links: makespan, span.", ""]
    lines += _head("ZBV at", *(f"v = {chunks}" for chunks in VIRTUAL_STAGES))
    for limit in LIMITS:
        cells = [f"{limit:g} of 1F1B's memory"]
        for chunks in VIRTUAL_STAGES:
            pairs = [(row[f"zbv@{limit:g}"], row[f"v={chunks}"]) for row in own]
            faster = [sum(ours[key] < theirs[key] * (1 - 1e-9) for ours, theirs in pairs) for key in ("makespan_ms", "span_ms")]
            cells.append(f"{faster[0]}, {faster[1]}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = Parser(
        prog="python -m tools.benchmarks.interleaved",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", help="rows of published.json, counted from 0 and separated by commas (default: all)")
    parser.add_argument("--effort", choices=[each.value for each in Effort], default="fast", help="as for zerobubble plan")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the report as a page; - prints it (the default)", default="-")
    args = parser.parse_args(argv)
    configs = read_configs(str(PUBLISHED), args.rows)
    todo = [(config, factor) for factor in LINKS for config in configs]
    effort = Effort(args.effort)
    rows = [compared(config, factor, effort) for config, factor in track(todo, "rows")]
    report = {"format": FORMAT, "effort": args.effort, "rows": rows}
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.markdown == "-":
        sys.stdout.write(markdown(report))
    else:
        Path(args.markdown).write_text(markdown(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
