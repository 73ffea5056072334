"""Compare ZBV with interleaved 1F1B on the published times: span, makespan, activation memory, messages.

All of it is simulated. Interleaved 1F1B is the fixed order with 2, 4 and 8 virtual stages (VPP) per rank; ZBV is planned for each
memory limit and each objective. The times of links are the published ones, and multiples of them: interleaving with v virtual
stages sends v times as many messages as 1F1B, a V twice as many.

  python -m tools.benchmarks.interleaved --json docs/benchmarks/data/interleaved.json --markdown docs/benchmarks/interleaved.md
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import Simulation, simulate
from tools.benchmarks.published_times import Config, read_configs
from tools.benchmarks.reports import PUBLISHED, ROOT, Row, markdown_table, mean_and_range, run_report, with_tables

FORMAT = "zerobubble-interleaved-benchmark/1"
PAGE = ROOT / "docs" / "benchmarks" / "interleaved.md"
VIRTUAL_STAGES = (2, 4, 8)
LIMITS = (1.0, 0.75)
LINKS = (1.0, 4.0, 16.0)
"""Times of a link, as multiples of the published one."""


def messages(placement: Placement) -> int:
    """Messages of one microbatch, forward and backward, over links between ranks."""
    ranks = placement.stage_to_rank
    return 2 * sum(one != other for one, other in itertools.pairwise(ranks))


def compared(config: Config, factor: float, effort: Effort) -> Row:
    """One row: each interleaving, and ZBV for each limit, planned for the makespan and for the span."""

    def costs_of(placement: Placement) -> CostModel:
        costs = config.costs_of(placement)
        return replace(costs, comm_ms=factor * costs.comm_ms)

    p, m = config.num_ranks, config.num_microbatches
    row: Row = {"row": config.row, "model": config.model, "p": p, "m": m, "link": factor}
    for chunks in VIRTUAL_STAGES:
        plan = build_plan("interleaved-1f1b", num_ranks=p, num_microbatches=m, num_chunks=chunks)
        found = simulate(plan, costs_of(plan.placement))
        row[f"v={chunks}"] = _measures(found, found)
    for limit in LIMITS:
        spans, makespans = (
            make_plan(
                PlanRequest(
                    schedule="zbv",
                    num_ranks=p,
                    num_microbatches=m,
                    stages=costs_of,
                    options=SearchOptions(memory_limit=limit, objective=objective, budget=effort.budget),
                )
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


def markdown(report: Row) -> str:
    """The page with the tables of the report."""
    rows = report["rows"]
    lines = []
    for limit, factor, chunks in itertools.product(LIMITS, LINKS, VIRTUAL_STAGES):
        pairs = [(row[f"zbv@{limit:g}"], row[f"v={chunks}"]) for row in rows if row["link"] == factor]
        if not pairs:
            continue
        cells = [f"{limit:g} of 1F1B's memory", f"{factor:g} times", f"v = {chunks}"]
        cells += [mean_and_range([theirs[key] / ours[key] for ours, theirs in pairs]) for key in ("makespan_ms", "span_ms")]
        cells += [mean_and_range([ours[key] / theirs[key] for ours, theirs in pairs]) for key in ("memory", "messages")]
        faster = sum(ours["makespan_ms"] < theirs["makespan_ms"] * (1 - 1e-9) for ours, theirs in pairs)
        lines.append([*cells, f"{faster} of {len(pairs)}"])
    heads = ("ZBV at", "links", "interleaved", "makespan", "span", "memory over theirs", "messages over theirs", "faster on")
    return with_tables(PAGE, [markdown_table(heads, lines)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.interleaved", description=__doc__, formatter_class=raw)
    parser.add_argument("--rows", help="rows of published.json, counted from 0 and separated by commas (default: all)")
    parser.add_argument("--effort", choices=[each.value for each in Effort], default="fast", help="as for zerobubble plan")

    def measured(args: argparse.Namespace) -> Row:
        configs, effort = read_configs(PUBLISHED, args.rows), Effort(args.effort)
        todo = [(config, factor) for factor in LINKS for config in configs]
        rows = [compared(config, factor, effort) for config, factor in track(todo, "rows")]
        return {"effort": args.effort, "rows": rows}

    return run_report(parser, argv, FORMAT, measured, markdown)


if __name__ == "__main__":
    raise SystemExit(main())
