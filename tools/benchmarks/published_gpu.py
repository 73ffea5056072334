"""Simulate what others have measured on GPUs, and print measured beside simulated. No speed of ours was measured on a GPU.

The measurements and their sources are in `docs/benchmarks/data/published_gpu.json`:

  iterations  16 iterations of 1F1B with very uneven stages, whose passes are published per rank
  gains       throughput over 1F1B of interleaved 1F1B, ZB-1p, ZB-2p and ZBV, four models; the passes are those of published.json

A deviation is measured over simulated, less 1: an iteration that took longer, a gain that was larger. Zero-bubble schedules are
planned at their published memory and compared by their span, because their authors ran post-validation.

  python -m tools.benchmarks.published_gpu --json docs/benchmarks/data/published_gpu_simulated.json \\
      --markdown docs/benchmarks/published_gpu.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import CostsOf, PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import Simulation, simulate
from tools.benchmarks.published_times import Config, read_configs
from tools.benchmarks.reports import PUBLISHED, ROOT, Row, markdown_table, mean_and_range, run_report, with_tables

FORMAT = "zerobubble-published-gpu-benchmark/1"
FACTS = ROOT / "docs" / "benchmarks" / "data" / "published_gpu.json"
PAGE = ROOT / "docs" / "benchmarks" / "published_gpu.md"
ITERATION, GAIN = 0.02, 0.06
"""Largest deviations that are within our tolerance: of an iteration of 1F1B, and of a gain over it."""
OURS = {"ZB-1p": ("zb", 1.0), "ZB-2p": ("zb", 2.0), "ZBV": ("zbv", 1.0)}
"""Published name -> our schedule and its memory limit."""
INTERLEAVED, BETWEEN = "interleaved 1F1B", "interleaved 1F1B, messages between passes"
CONTENDERS = ("ZB-1p", "ZB-2p", "ZBV", INTERLEAVED, BETWEEN)


def deviation(row: Row) -> float:
    """Measured over simulated, less 1."""
    return float(row["measured"] / row["simulated"] - 1)


def iteration(row: Row, num_ranks: int, num_microbatches: int) -> Row:
    """One iteration of 1F1B with the passes of each rank."""
    ones = (1.0,) * num_ranks
    lists = {"forward_ms": row["forward_ms"], "backward_ms": row["backward_wgrad_ms"], "wgrad_ms": (0.0,) * num_ranks}
    costs = CostModel.of_lists(lists | {"activation": ones, "activation_after_backward": ones})
    simulation = simulate(build_plan("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches), costs)
    kept = {name: row[name] for name in ("vocabulary", "sequence", "contender")}
    return kept | {"measured": row["iteration_ms"], "simulated": round(simulation.makespan_ms, 1)}


def between_passes(costs: CostModel) -> CostModel:
    """Costs where a rank waits for its messages before it goes on, instead of computing beside them."""
    forward, backward = (tuple(value + costs.comm_ms for value in each) for each in (costs.forward_ms, costs.backward_ms))
    return replace(costs.with_lists(forward_ms=forward, backward_ms=backward), comm_ms=0.0)


def stock(p: int, m: int, chunks: int, costs_of: CostsOf, *, is_between: bool = False) -> float:
    """The makespan of 1F1B, or of interleaved 1F1B."""
    name, num_chunks = ("1f1b", None) if chunks == 1 else ("interleaved-1f1b", chunks)
    plan = build_plan(name, num_ranks=p, num_microbatches=m, num_chunks=num_chunks)
    costs = costs_of(plan.placement)
    return simulate(plan, between_passes(costs) if is_between else costs).makespan_ms


def planned(name: str, p: int, m: int, costs_of: CostsOf) -> Simulation:
    """Our plan for a published schedule."""
    schedule, limit = OURS[name]
    options = SearchOptions(memory_limit=limit, objective=Objective.SPAN, budget=Effort.FAST.budget)
    return make_plan(PlanRequest(schedule=schedule, num_ranks=p, num_microbatches=m, stages=costs_of, options=options)).simulation


def gains(row: Row, place: int, config: Config) -> list[Row]:
    """The gains of one model and number of microbatches over 1F1B."""
    p, m, costs_of = config.num_ranks, config.num_microbatches, config.costs_of
    base, measured = stock(p, m, 1, costs_of), {name: values[place] for name, values in row["samples_per_s_per_gpu"].items()}
    found = []
    for name in CONTENDERS:
        published = INTERLEAVED if name == BETWEEN else name
        if published not in measured:
            continue
        if name == BETWEEN:
            gain = stock(p, m, 1, costs_of, is_between=True) / stock(p, m, row["virtual_stages"], costs_of, is_between=True)
        elif name == INTERLEAVED:
            gain = base / stock(p, m, row["virtual_stages"], costs_of)
        else:
            gain = base / planned(name, p, m, costs_of).span_ms
        kept = {"set": row["set"], "model": row["model"], "p": p, "m": m, "contender": name}
        found.append(kept | {"measured": round(measured[published] / measured["1F1B"], 4), "simulated": round(gain, 4)})
    return found


def measure(args: argparse.Namespace) -> Row:
    """Simulate every row."""
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    uneven, zero_bubble = facts["vocabulary_parallelism"], facts["zero_bubble_a100"]["rows"]
    configs = read_configs(PUBLISHED)
    sets = [body["set"] for body in json.loads(PUBLISHED.read_text(encoding="utf-8"))["configs"]]
    by_name = {(s, c.model, c.num_ranks, c.num_microbatches): c for s, c in zip(sets, configs, strict=True)}
    todo = [(row, place, m) for row in zero_bubble for place, m in enumerate(row["num_microbatches"])]
    return {
        "iterations": [iteration(row, uneven["num_ranks"], uneven["num_microbatches"]) for row in uneven["rows"]],
        "gains": [
            found
            for row, place, m in track(todo, "models")
            for found in gains(row, place, by_name[row["set"], row["model"], row["num_ranks"], m])
        ],
    }


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row['measured']:.3f} / {row['simulated']:.3f} ({_percent(deviation(row))})"


def markdown(report: Row) -> str:
    """The page with the tables of the report."""
    iterations, found = report["iterations"], report["gains"]
    uneven = []
    for row in iterations:
        layers = row["contender"].removeprefix("1F1B, ").replace("1F1B", "even")
        times = f"{row['measured']:.1f}", f"{row['simulated']:.1f}", _percent(deviation(row))
        uneven.append([row["vocabulary"], row["sequence"], layers, *times])
    summary, models = [], []
    for name in CONTENDERS:
        own = [100 * deviation(row) for row in found if row["contender"] == name]
        summary.append([name, str(len(own)), mean_and_range(own, "+.1f")])
    for key in dict.fromkeys((row["set"], row["model"], row["p"], row["m"]) for row in found):
        by_name = {r["contender"]: r for r in found if (r["set"], r["model"], r["p"], r["m"]) == key}
        models.append([key[1], str(key[2]), str(key[3]), *(_cell(by_name.get(name)) for name in CONTENDERS)])
    return with_tables(
        PAGE,
        [
            markdown_table(("vocabulary", "sequence", "layers", "measured, ms", "simulated, ms", "deviation"), uneven),
            markdown_table(("schedule", "rows", "deviation, %: mean (smallest to largest)"), summary),
            markdown_table(("model", "p", "m", *CONTENDERS), models),
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.published_gpu", description=__doc__, formatter_class=raw)
    return run_report(parser, argv, FORMAT, measure, markdown)


if __name__ == "__main__":
    raise SystemExit(main())
