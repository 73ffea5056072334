"""All-to-alls of experts (EP) hidden by pairs of F and B, and by W: iteration time and memory, beside megatron-core's overlap.

The table is simulated. F, B and W of a rank take the same time, all-to-alls included, and a microbatch's activations stay whole
until its W. megatron-core's overlap is modelled by its own order: interleaved 1F1B with one F more ahead, and then pairs of an F
and a BW (`overlap_moe_expert_parallel_comm`). Some plans are emulated, too: on the executor and gloo links, with passes and
all-to-alls that sleep.

  python -m tools.benchmarks.ep_overlap --json docs/benchmarks/data/ep_overlap.json --markdown docs/benchmarks/ep-overlap.md
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

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
from tools.benchmarks.emulation import alternating_parts
from tools.benchmarks.reports import ROOT, Row, markdown_table, run_report, with_tables
from tools.benchmarks.schedules.emulated import Emulation, measure
from tools.benchmarks.schedules.report import Estimate

FORMAT = "zerobubble-ep-overlap-benchmark/1"
PAGE = ROOT / "docs" / "benchmarks" / "ep-overlap.md"
SHARES = (0.2, 0.4, 0.6)
"""Of F and of B."""
LAYERS = (1, 2, 4, 8, 16)
EMULATED = ("ZBV, no overlap", "ZB-H1, pairs", "ZBV, pairs", "ZB-H1, limit 1, W", "ZB-H1, W", "ZBV, W")
EMULATED_RANKS, EMULATED_MICROBATCHES, EMULATED_MS = 4, 12, 100.0
"""Time of F, B and W of a rank. Sleeps are about 0.1 ms late where processes outnumber cores."""


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


class Contender(NamedTuple):
    """A way to order the passes."""

    plan_of: Callable[[int], Plan]
    """Number of microbatches -> plan."""
    wgrad_beside: float = 0.0
    """Share of W that can be computed beside all-to-alls of single passes."""

    def costs(self, plan: Plan, share: float, pass_ms: float = 1.0) -> CostModel:
        """Costs with a share of all-to-alls, and this time for F, B and W of a rank."""
        costs = CostModel.uniform(plan.placement, forward_ms=pass_ms, backward_ms=pass_ms, wgrad_ms=pass_ms)
        return replace(costs, all_to_all=(share, share), wgrad_beside=self.wgrad_beside)


def contenders(num_ranks: int, share: float) -> Iterator[tuple[str, Contender]]:
    """The contenders with their names."""

    def single(name: str, num_chunks: int | None = None) -> Contender:
        return Contender(lambda m: build_plan(name, num_ranks=num_ranks, num_microbatches=m, num_chunks=num_chunks))

    def chosen(name: str, limit: float | None, beside: float) -> Contender:
        def plan_of(num_microbatches: int) -> Plan:
            plan = build_plan(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
            return with_pairs(plan, Contender(plan_of, beside).costs(plan, share), Objective.MAKESPAN, limit)

        return Contender(plan_of, beside)

    def combined(num_chunks: int) -> Contender:
        return Contender(lambda m: combined_interleaved(num_ranks, m, num_chunks))

    for name, title in (("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zbv", "ZBV")):
        yield f"{title}, no overlap", single(name)
    for chunks in (2, 4):
        yield f"interleaved v = {chunks}, no overlap", single("interleaved-1f1b", chunks)
        yield f"interleaved v = {chunks}, megatron-core's overlap", combined(chunks)
    yield "DualPipeV, torch's table", Contender(lambda m: from_torch_csv(torch_dualpipev(num_ranks, m), schedule="dualpipev"))
    for name, title, limit, ways in (
        ("1f1b", "1F1B, limit 2", 2.0, ("pairs",)),
        ("zb-h1", "ZB-H1, limit 1", 1.0, ("W",)),
        ("zb-h1", "ZB-H1", None, ("pairs", "W")),
        ("zb-h1", "ZB, limit 2", 2.0, ("pairs", "pairs and W")),
        ("zbv", "ZBV, limit 1", 1.0, ("pairs", "pairs and W")),
        ("zbv", "ZBV", None, ("pairs", "W")),
    ):
        for way in ways:
            yield f"{title}, {way}", chosen(name, limit, float("W" in way))


def measured(num_ranks: int, num_microbatches: int) -> list[Row]:
    """A row per contender and share: makespan and memory; what a microbatch more takes; how much communication is hidden."""
    rows = []
    for share in SHARES:
        for name, each in contenders(num_ranks, share):
            plans = [each.plan_of(num_microbatches), each.plan_of(2 * num_microbatches)]
            found, longer = (simulate(plan, each.costs(plan, share)) for plan in plans)
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

    A resource takes what can start first, and of two parts that of the op with more left.
    """
    chains = [alternating_parts(1 - share, share, is_forward, num_layers) for is_forward in (True, False)]
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


def emulated(rounds: int) -> list[Row]:
    """A row per contender and share: the span of every round, and that of the simulator."""
    found = []
    for share in SHARES:
        emulations = []
        for name, each in contenders(EMULATED_RANKS, share):
            if name in EMULATED:
                plan = each.plan_of(EMULATED_MICROBATCHES)
                costs = each.costs(plan, share, EMULATED_MS)
                emulations.append(Emulation(name=name, baseline=EMULATED[0], plan=plan, costs=costs))
        (result,) = measure(emulations, rounds=rounds, message_kib=1.0)
        for row in result["rows"]:
            times = {"simulated_ms": round(row["predicted_ms"], 6), "rounds_ms": row["rounds_ms"]}
            found.append({"contender": row["name"], "all_to_all": share} | times)
    return found


def ratio(row: Row) -> Estimate:
    """The median span of the rounds over the simulator's: other jobs on the machine make some rounds longer, and none shorter."""
    return Estimate.of(row["rounds_ms"], statistics.median).over(row["simulated_ms"])


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
        "emulated": {
            "p": EMULATED_RANKS,
            "m": EMULATED_MICROBATCHES,
            "pass_ms": EMULATED_MS,
            "rows": emulated(args.rounds),
        },
    }


def markdown(report: Row) -> str:
    """The page with its tables."""
    names = list(dict.fromkeys(row["contender"] for row in report["rows"]))
    found = {(row["contender"], row["all_to_all"]): row for row in report["rows"]}
    lines = [
        [name, " / ".join(f"{value:.2f}" for value in dict.fromkeys(found[name, share]["memory"] for share in SHARES))]
        + [_cell(found[name, share]) for share in SHARES]
        for name in names
    ]
    heads = ["contender", "memory", *(f"all-to-alls {share:.0%}" for share in SHARES)]
    ratios = [
        [
            row["contender"],
            f"{row['all_to_all']:.0%}",
            f"{row['simulated_ms']:.0f}",
            f"{statistics.median(row['rounds_ms']):.0f}",
            "{value:.3f} ({low:.3f} to {high:.3f})".format(**asdict(ratio(row))),
        ]
        for row in report["emulated"]["rows"]
    ]
    beside = ["contender", "all-to-alls", "simulated ms", "emulated ms", "ratio (95 %)"]
    return with_tables(PAGE, [markdown_table(heads, lines), markdown_table(beside, ratios)])


def _cell(row: Row) -> str:
    return f"{row['makespan_ms']:.1f}, {row['per_microbatch_ms']:.2f} each, {row['hidden']:.0%} hidden"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = Parser(prog="python -m tools.benchmarks.ep_overlap", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--num-ranks", "-p", type=int, default=8, help="pipeline ranks (default %(default)s)")
    parser.add_argument("--num-microbatches", "-m", type=int, default=24, help="microbatches (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of emulated iterations (default %(default)s)")
    return run_report(parser, argv, FORMAT, benchmark, markdown)


if __name__ == "__main__":
    raise SystemExit(main())
