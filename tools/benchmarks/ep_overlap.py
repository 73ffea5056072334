"""All-to-alls of experts (EP) hidden by pairs of F and B: iteration time and memory, beside megatron-core's overlap and none.

All of it is simulated. F, B and W of a rank take the same time, all-to-alls included, and a microbatch's activations stay whole
until its W. megatron-core's overlap is modelled by its own order: interleaved 1F1B with one F more ahead, and then pairs of an F
and a BW (`overlap_moe_expert_parallel_comm`).

  python -m tools.benchmarks.ep_overlap --json docs/benchmarks/data/ep_overlap.json --markdown docs/benchmarks/ep-overlap.md
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.pairing import with_pairs
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.torch_csv import from_torch_csv
from megatron.zerobubble.plan.validate import validate
from tools.benchmarks.reports import ROOT, Row, markdown_table, run_report, with_tables

FORMAT = "zerobubble-ep-overlap-benchmark/1"
PAGE = ROOT / "docs" / "benchmarks" / "ep-overlap.md"
SHARES = (0.2, 0.4, 0.6)
"""Of F and of B."""
LAYERS = (1, 2, 4, 8, 16)


def combined_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Plan:
    """megatron-core's order with `overlap_moe_expert_parallel_comm`, of a number of microbatches that p divides."""
    plan = build_plan("interleaved-1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    rows, pairs = [], set[Op]()
    for rank, row in enumerate(plan.ops):
        forwards, backwards = ([op for op in row if (op.kind is OpKind.F) is wanted] for wanted in (True, False))
        ahead = min((num_ranks - rank - 1) * 2 + (num_chunks - 1) * num_ranks + 1, len(forwards))
        together = list(zip(forwards[ahead:], backwards, strict=False))
        pairs.update(forward for forward, _ in together)
        rows.append((*forwards[:ahead], *(op for pair in together for op in pair), *backwards[len(together) :]))
    combined = replace(plan, ops=tuple(rows), pairs=frozenset(pairs))
    validate(combined)
    return combined


def torch_dualpipev(num_ranks: int, num_microbatches: int) -> str:
    """torch's action table of DualPipeV, for at least 2p microbatches."""
    schedule = ScheduleDualPipeV.__new__(ScheduleDualPipeV)  # the constructor wants process groups
    schedule.pp_group_size, schedule.num_stages = num_ranks, 2 * num_ranks
    schedule._num_stages, schedule._n_microbatches = 2 * num_ranks, num_microbatches
    rows = (schedule._calculate_single_rank_operations(rank) for rank in range(num_ranks))
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def contenders(num_ranks: int, share: float) -> Iterator[tuple[str, Callable[[int], Plan]]]:
    """The name of each contender, and its plan for a number of microbatches."""

    def single(name: str, num_chunks: int | None = None) -> Callable[[int], Plan]:
        return lambda m: build_plan(name, num_ranks=num_ranks, num_microbatches=m, num_chunks=num_chunks)

    def paired(name: str, limit: float | None) -> Callable[[int], Plan]:
        plan_of = single(name)
        return lambda m: with_pairs(plan_of(m), _costs(plan_of(m), share), Objective.MAKESPAN, limit)

    def combined(num_chunks: int) -> Callable[[int], Plan]:
        return lambda m: combined_interleaved(num_ranks, m, num_chunks)

    for name, title in (("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zbv", "ZBV")):
        yield f"{title}, no overlap", single(name)
    for chunks in (2, 4):
        yield f"interleaved v = {chunks}, no overlap", single("interleaved-1f1b", chunks)
        yield f"interleaved v = {chunks}, megatron-core's overlap", combined(chunks)
    yield "DualPipeV, torch's table", lambda m: from_torch_csv(torch_dualpipev(num_ranks, m), schedule="dualpipev")
    for name, title, limit in (
        ("1f1b", "1F1B, limit 2", 2.0),
        ("zb-h1", "ZB-H1", None),
        ("zb-h1", "ZB, limit 1.5", 1.5),
        ("zb-h1", "ZB, limit 2", 2.0),
        ("zbv", "ZBV, limit 1", 1.0),
        ("zbv", "ZBV", None),
    ):
        yield f"{title}, pairs", paired(name, limit)


def _costs(plan: Plan, share: float) -> CostModel:
    return replace(CostModel.uniform(plan.placement), all_to_all=(share, share))


def measured(num_ranks: int, num_microbatches: int) -> list[Row]:
    """A row per contender and share: makespan and memory; what a microbatch more takes; how much communication is hidden."""
    rows = []
    for share in SHARES:
        for name, plan_of in contenders(num_ranks, share):
            plans = [plan_of(num_microbatches), plan_of(2 * num_microbatches)]
            found, longer = (simulate(plan, _costs(plan, share)) for plan in plans)
            exposed, hidden = (sum(each) for each in zip(*found.communication_ms, strict=True))
            rows.append(
                {
                    "contender": name,
                    "all_to_all": share,
                    "makespan_ms": round(found.makespan_ms, 6),
                    "memory": round(max(found.peak_memory), 6),
                    "per_microbatch_ms": round((longer.makespan_ms - found.makespan_ms) / num_microbatches, 6),
                    "hidden": round(hidden / (exposed + hidden), 6),
                    "pairs": len(plans[0].pairs),
                }
            )
    return rows


def alternating_ms(num_layers: int, share: float) -> float:
    """Time of a pair of one F and one B of these layers, 1 ms each, whose parts run in their order on two resources.

    A layer of F is attention, dispatch, experts and combine, one of B the reverse. Attention is two thirds of the computation,
    and both all-to-alls are equal. A resource takes what can start first, and of two parts that of the op with more left.
    """
    computes, travels = (1 - share) / 3 / num_layers, share / 2 / num_layers
    layer = [(0, 2 * computes), (1, travels), (0, computes), (1, travels)]
    chains = [layer * num_layers, layer[::-1] * num_layers]
    at, ready, free = [0, 0], [0.0, 0.0], [0.0, 0.0]
    while any(place < len(chain) for place, chain in zip(at, chains, strict=True)):
        open_ = [which for which in (0, 1) if at[which] < len(chains[which])]
        starts: list[tuple[float, int, int]] = []
        for which in open_:
            resource, _ = chains[which][at[which]]
            heapq.heappush(starts, (max(ready[which], free[resource]), at[which] - len(chains[which]), which))
        start, _, which = starts[0]
        resource, takes = chains[which][at[which]]
        ready[which] = free[resource] = start + takes
        at[which] += 1
    return max(ready)


def benchmark(args: argparse.Namespace) -> Row:
    """The report."""
    return {
        "command": args.command,
        "p": args.num_ranks,
        "m": args.num_microbatches,
        "rows": measured(args.num_ranks, args.num_microbatches),
        "pairs_of_layers": [
            {"layers": layers, "all_to_all": share, "pair_ms": round(alternating_ms(layers, share), 6)}
            for layers in LAYERS
            for share in SHARES
        ],
    }


def markdown(report: Row) -> str:
    """The page with its table."""
    names = list(dict.fromkeys(row["contender"] for row in report["rows"]))
    found = {(row["contender"], row["all_to_all"]): row for row in report["rows"]}
    lines = [
        [name, " / ".join(f"{value:.2f}" for value in dict.fromkeys(found[name, share]["memory"] for share in SHARES))]
        + [_cell(found[name, share]) for share in SHARES]
        for name in names
    ]
    heads = ["contender", "memory", *(f"all-to-alls {share:.0%}" for share in SHARES)]
    return with_tables(PAGE, [markdown_table(heads, lines)])


def _cell(row: Row) -> str:
    return f"{row['makespan_ms']:.1f}, {row['per_microbatch_ms']:.2f} each, {row['hidden']:.0%} hidden"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = Parser(prog="python -m tools.benchmarks.ep_overlap", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--num-ranks", "-p", type=int, default=8, help="pipeline ranks (default %(default)s)")
    parser.add_argument("--num-microbatches", "-m", type=int, default=24, help="microbatches (default %(default)s)")
    return run_report(parser, argv, FORMAT, benchmark, markdown)


if __name__ == "__main__":
    raise SystemExit(main())
