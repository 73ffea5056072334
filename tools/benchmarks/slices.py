"""Slices of microbatches for long sequences: iteration time, idle time and memory against 1F1B, interleaved 1F1B and ZBV.

Simulated, with F, B and W by the FLOPs of a layer of h = 8192 and free links.

  python -m tools.benchmarks.slices --json docs/benchmarks/data/slices.json --markdown docs/long-sequences.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from tools.benchmarks.reports import ROOT, Row, markdown_table, run_report, with_tables

FORMAT = "zerobubble-slices-benchmark/1"
PAGE = ROOT / "docs" / "long-sequences.md"
HIDDEN_SIZE, LENGTHS, RANKS, SLICES = 8192, (4096, 32768, 131072), (4, 8, 16), (2, 4, 8, 16)
SCHEDULES = ("1f1b", "zb-h1", "zbv")
PARTS = 512
"""A slice has a multiple of this part of its sequence in tokens: 8 of 4k, 64 of 32k, 256 of 128k."""
KEY_SHARES = {"8 KV heads of 64": 4 / 34 / 8, "as many KV heads as heads": 4 / 34}
"""Of a layer's activation memory without recomputation, 34 sbh bytes (arXiv 2205.05198), keys and values are 4 sbh at most."""
WITHIN = 0.25
"""Memory limit of the searched plans: of 1F1B's activation memory."""


def by_formula(seq_length: int, placement: Placement, total_ms: float = 60.0) -> CostModel:
    """Costs of a layer of `HIDDEN_SIZE` by its FLOPs and bytes (arXiv 2401.10241, table 1), without the scores of attention.

    F, B and W of a rank take `total_ms` together, links are free.
    """
    linear, scores = 24 * HIDDEN_SIZE, 4 * seq_length
    passes = {"forward_ms": linear + scores, "backward_ms": linear + 2 * scores, "wgrad_ms": linear}
    unit = total_ms / sum(passes.values())
    return CostModel.uniform(
        placement, **{name: unit * value for name, value in passes.items()}, activation_after_backward=32 / 34
    )


def slicing(seq_length: int, key_share: float) -> LengthsAndLinks:
    """How the costs of a sequence of this length divide among slices."""
    share = 4 * seq_length / (24 * HIDDEN_SIZE + 4 * seq_length)
    return LengthsAndLinks(sequence_length=seq_length, attention_share=share, key_share=key_share, multiple=seq_length // PARTS)


def costs_of(seq_length: int, placement: Placement, num_slices: int, key_share: float) -> CostModel:
    """Costs of the slices of a sequence; of a whole one with 1."""
    return slicing(seq_length, key_share).applied(by_formula(seq_length, placement), num_slices)


def simulated(p: int, m: int, seq_length: int, effort: Effort) -> Row:
    """One pipeline and length: what runs today, and every schedule and number of slices."""

    def of(plan: Plan, num_slices: int = 1, key_share: float = 0.0) -> Row:
        costs = costs_of(seq_length, plan.placement, num_slices, key_share)
        found = simulate(plan, costs)
        row: Row = {"makespan_ms": found.makespan_ms, "idle": found.idle_share, "memory": max(found.peak_memory)}
        return row | {"gap": lower_bound(plan.placement, m, costs, max(found.peak_memory)).makespan_gap(found.makespan_ms)}

    options = SearchOptions(memory_limit=1.0, objective=Objective.MAKESPAN, budget=effort.budget)
    best = make_plan(
        PlanRequest(
            schedule="zbv", num_ranks=p, num_microbatches=m, stages=lambda at: by_formula(seq_length, at), options=options
        )
    )
    row: Row = {"p": p, "m": m, "seq_length": seq_length, "zbv": of(best.simulation.plan)}
    row["1f1b"] = of(build_plan("1f1b", num_ranks=p, num_microbatches=m))
    row["interleaved v=4"] = of(build_plan("interleaved-1f1b", num_ranks=p, num_microbatches=m, num_chunks=4))
    base = by_formula(seq_length, Placement.linear(p))
    work_ms = base.forward_ms[0] + base.backward_ms[0] + base.wgrad_ms[0]
    for n in SLICES:
        row[f"formula n={n}"] = (m + (p - 1) / n) * work_ms
        for name in SCHEDULES:
            plan = build_plan(name, num_ranks=p, num_microbatches=m, num_slices=n)
            few, many = (of(plan, n, share) for share in KEY_SHARES.values())
            row[f"{name} n={n}"] = few | {"memory_all_heads": many["memory"]}
    if (p, m) == (8, 16):
        share = KEY_SHARES["8 KV heads of 64"]
        within = SearchOptions(memory_limit=WITHIN, objective=Objective.MAKESPAN, budget=effort.budget)
        planned = make_plan(
            PlanRequest(
                schedule="zbv",
                num_ranks=p,
                num_microbatches=m,
                stages=lambda at: by_formula(seq_length, at),
                options=within,
                num_slices=(8,),
                lengths=slicing(seq_length, share),
            )
        )
        row["zbv planned n=8"] = of(planned.simulation.plan, 8, share)
    return row


def markdown(report: Row) -> str:
    """The page with the tables of the report."""
    lines = []
    for row in report["rows"]:
        base = row["1f1b"]["makespan_ms"]
        for name in ("interleaved v=4", "zbv", *(f"{each} n={n}" for n in SLICES for each in SCHEDULES), "zbv planned n=8"):
            if row["p"] != 8 or row["m"] != 16 or (name.startswith("zb-h1") and not name.endswith("n=8")):
                continue
            found = row[name]
            memory = f"{found['memory']:.2f}"
            if "memory_all_heads" in found:
                memory += f" ({found['memory_all_heads']:.2f})"
            cells = [f"{row['seq_length'] // 1024}k", name, f"{base / found['makespan_ms']:.3f}", f"{100 * found['idle']:.1f} %"]
            lines.append([*cells, memory, f"{100 * found['gap']:.1f} %"])
    heads = ("s", "schedule", "times as fast as 1F1B", "idle", "memory", "above the lower bound")
    return with_tables(PAGE, [markdown_table(heads, lines), _over_all(report)])


def _over_all(report: Row) -> list[str]:
    """Per n, over all pipelines and lengths, the least and the most of what the schedules over slices give."""
    lines = []
    for n in SLICES:
        cells = [str(n)]
        for name in ("1f1b", "zbv"):
            rows = report["rows"]
            over = [row[f"{name} n={n}"]["makespan_ms"] / row[f"formula n={n}"] for row in rows]
            theirs = [row["interleaved v=4"]["makespan_ms"] / row[f"{name} n={n}"]["makespan_ms"] for row in rows]
            memory = [row[f"{name} n={n}"]["memory"] for row in rows]
            cells += [f"{min(each):.2f} to {max(each):.2f}" for each in (over, theirs, memory)]
        lines.append(cells)
    columns = ("over (m + (p-1)/n) work", "times as fast as v = 4", "memory")
    return markdown_table(("n", *(f"{name}, {each}" for name in ("1F1B", "ZBV") for each in columns)), lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.slices", description=__doc__, formatter_class=raw)
    parser.add_argument("--effort", choices=[each.value for each in Effort], default="fast", help="of ZBV without slices")

    def measured(args: argparse.Namespace) -> Row:
        todo = [(p, m, length) for p in RANKS for m in (p, 2 * p) for length in LENGTHS]
        return {"effort": args.effort, "rows": [simulated(*each, Effort(args.effort)) for each in track(todo, "pipelines")]}

    return run_report(parser, argv, FORMAT, measured, markdown)


if __name__ == "__main__":
    raise SystemExit(main())
