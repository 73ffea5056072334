"""Train a GPT on microbatches of unequal length on two ranks, and compare the gain of planning them with the simulator's.

Samples are files of Python's standard library, cut at the longest length; every contender trains on the same ones in every round.
1F1B and interleaved 1F1B run them sorted by length, in the direction that the simulator prefers, ZBV as they come, and ZBV in the
order planned for them. All are built once and take turns.

First some iterations of each placement are timed and fitted to the lengths; the plan knows those costs. The simulator gets the
costs that fit all passes of a contender in the rounds that count: on a CPU they depend on what runs beside them. The makespan is
that of the passes: from the start of the first op of any rank to the end of the last one of any. *Kept* is the measured gain of
the plan over a contender, over the simulated one, the gain with a 95 % interval over the rounds.

  python -m tools.benchmarks.unequal_real --json docs/benchmarks/data/unequal_real.json
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.profiling.length_fit import fit_lengths
from megatron.zerobubble.profiling.profile import ByLength, RankProfile
from tools.benchmarks.emulation import run_on_ranks
from tools.benchmarks.reports import write_json
from tools.benchmarks.schedules.contenders import ContenderSpec, Runtime, Sizes
from tools.benchmarks.schedules.report import Estimate

FORMAT = "zerobubble-unequal-real-benchmark/1"
NUM_RANKS = 2
PROFILED = 3
LONGEST, BYTES_PER_TOKEN = 8192, 4
CONTENDERS = {
    "1f1b sorted": ("1f1b", False),
    "interleaved sorted": ("interleaved-1f1b", False),
    "zbv as it comes": ("zbv", False),
    "zbv planned": ("zbv", True),
}
"""Name -> schedule, and whether microbatches are reordered for their lengths."""


def library_lengths() -> tuple[int, ...]:
    """Tokens of the standard library's files, without its tests, in ascending order."""
    files = []
    for parent, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in ("test", "tests", "site-packages")]
        files += [Path(parent) / name for name in names if name.endswith(".py")]
    sizes = sorted(path.stat().st_size for path in files)
    return tuple(min(LONGEST, size // BYTES_PER_TOKEN) for size in sizes if size >= BYTES_PER_TOKEN)


def batches_of(num_batches: int, num_microbatches: int, longest: int) -> list[list[int]]:
    """Lengths of the microbatches of each batch: those of the standard library's files, scaled so that the longest is whole."""
    random, known = Random(1), library_lengths()
    scale = longest / max(known)
    return [[max(1, round(scale * each)) for each in random.choices(known, k=num_microbatches)] for _ in range(num_batches)]


def serve(rank: int, sizes: Sizes, batches: Sequence[Sequence[int]], rounds: int) -> list[dict[str, Any]]:
    """Run one rank; its measurements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, on import and on every config
        from megatron.zerobubble.mcore.cpu.device import HostDevice
        from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory
        from megatron.zerobubble.mcore.microbatches.iteration_plans import UnequalOptions
        from megatron.zerobubble.profiling.profiler import Profiler
        from tools.benchmarks.schedules.gpt import GPTContender, set_up, tear_down

        class Contender(GPTContender):
            """A schedule on microbatches of unequal length."""

            def __init__(self, name: str, host: Any) -> None:
                schedule, self.reorders = CONTENDERS[name]
                self.lengths: Sequence[int] = batches[0]
                spec = ContenderSpec(name=name, runtime=Runtime.OURS, schedule=schedule, baseline=name)
                super().__init__(spec, sizes, NUM_RANKS, host)

            def _unequal_options(self) -> UnequalOptions:
                return UnequalOptions(
                    tokens_of=lambda item: int(item[0].size(1)),
                    usual_tokens=sizes.seq_length,
                    reorders=self.reorders,
                    objective=Objective.MAKESPAN,
                )

            def _batches(self, num_microbatches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
                source = torch.frombuffer(bytearray(Path(statistics.__file__).read_bytes()), dtype=torch.uint8).long()
                for length in self.lengths:
                    text = source[: sizes.micro_batch_size * length + 1]
                    shape = (sizes.micro_batch_size, length)
                    yield text[:-1].view(shape), text[1:].view(shape)

            def profiled(self) -> LengthModel:
                """Costs by length of this placement, from a few iterations after as many. All ranks must call it."""
                for each in batches[:PROFILED]:
                    self.lengths = each
                    self.iterate(len(each))
                profiler = self.schedule.hooks.profiler = Profiler(self.schedule.device)
                for each in batches[:PROFILED]:
                    self.lengths = each
                    self.iterate(len(each))
                self.schedule.hooks.profiler = None
                everybody: list[Any] = [None] * NUM_RANKS
                dist.all_gather_object(everybody, profiler.profile())
                model, _ = fit_lengths(everybody, self.schedule.spec.placement, usual_tokens=sizes.seq_length)
                return model

        keep_freed_memory()
        host = HostDevice()
        set_up(host, NUM_RANKS)
        contenders = {name: Contender(name, host) for name in CONTENDERS}
        models: dict[Any, LengthModel] = {}
        for each in contenders.values():
            placement = each.schedule.spec.placement
            if placement not in models:
                models[placement] = each.profiled()
            assert each.schedule.unequal is not None
            each.schedule.unequal.learn(models[placement], comm_ms=0.0, links=None, memory_limit=None)
        found = []
        numbers = range((rounds + 1) * len(batches))
        for number in track(numbers, "iterations") if rank == 0 else numbers:
            lengths = batches[number % len(batches)]
            for name, each in contenders.items():
                model = models[each.schedule.spec.placement]
                each.lengths, plan = _arranged(each, lengths, model)
                dist.barrier()
                each.iterate(len(lengths))
                ops = each.timed_ops()
                if number >= len(batches):
                    times = {"begin_ms": min(op.start_ms for op in ops), "end_ms": max(op.end_ms for op in ops)}
                    passes = [
                        (op.op.stage, op.op.kind, each.lengths[plan.batch_index(op.op.microbatch)], op.end_ms - op.start_ms)
                        for op in ops
                    ]
                    ran = {"plan": plan.to_json(), "lengths": list(each.lengths), "passes": passes}
                    found.append({"name": name, "batch": number % len(batches), **ran, **times})
        for each in contenders.values():
            each.close()
        tear_down(host)
    return found


def _costs(model: LengthModel, lengths: Sequence[int]) -> CostModel:
    return CostModel.of(model.costs(lengths))


def _arranged(contender: Any, lengths: Sequence[int], model: LengthModel) -> tuple[Sequence[int], Plan]:
    """The lengths in the order in which a contender gets them, and the plan that it then runs."""
    from megatron.zerobubble.mcore.microbatches.length_exchange import Lengths

    base = contender.schedule.plan(len(lengths))
    if contender.reorders:
        replicas = (tuple(Lengths(each, float(each) ** 2) for each in lengths),)
        return lengths, contender.schedule.unequal.planned(replicas)
    orders = [list(lengths)]
    if contender.schedule.spec.name != "zbv":
        orders = [sorted(lengths), sorted(lengths, reverse=True)]
    return min(orders, key=lambda each: simulate(base, _costs(model, each)).makespan_ms), base


def fitted(runs: Sequence[Sequence[dict[str, Any]]], placement: Placement, *, usual_tokens: int) -> LengthModel:
    """The costs by length that fit all passes of one contender, of all ranks and rounds."""
    timed: dict[tuple[int, OpKind], list[ByLength[float]]] = {}
    for both in runs:
        for stage, kind, tokens, elapsed in (each for run in both for each in run["passes"]):
            timed.setdefault((stage, kind), []).append(ByLength(tokens, float(tokens) ** 2, elapsed))
    profile = RankProfile(times_ms={}, memory={}, timed={key: tuple(values) for key, values in timed.items()})
    return fit_lengths([profile], placement, usual_tokens=usual_tokens)[0]


def rows_of(ranks: Sequence[Sequence[dict[str, Any]]], *, num_batches: int, usual_tokens: int) -> list[dict[str, Any]]:
    """Measured and simulated makespan of every iteration."""
    runs = list(zip(*ranks, strict=True))
    models = {}
    for name in CONTENDERS:
        own = [both for both in runs if both[0]["name"] == name]
        models[name] = fitted(own, Plan.from_json(own[0][0]["plan"]).placement, usual_tokens=usual_tokens)
    return [
        {
            "name": both[0]["name"],
            "batch": both[0]["batch"],
            "round": place // (len(CONTENDERS) * num_batches),
            "ms": max(each["end_ms"] for each in both) - min(each["begin_ms"] for each in both),
            "simulated_ms": simulate(
                Plan.from_json(both[0]["plan"]), _costs(models[both[0]["name"]], both[0]["lengths"])
            ).makespan_ms,
        }
        for place, both in enumerate(runs)
    ]


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    rows = result["rows"]
    planned = {(row["batch"], row["round"]): row for row in rows if row["name"] == "zbv planned"}
    lines = [
        f"{result['machine']}, {NUM_RANKS} ranks, {result['num_microbatches']} microbatches, {result['num_batches']} batches, "
        f"{result['rounds']} rounds.",
        "",
        "| contender | makespan, ms | simulated, ms | gain of the plan | simulated | kept |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in CONTENDERS:
        own = [row for row in rows if row["name"] == name]
        pairs = [(row, planned[row["batch"], row["round"]]) for row in own]
        simulated = statistics.fmean(row["simulated_ms"] / other["simulated_ms"] for row, other in pairs)
        by_round: dict[int, list[float]] = {}
        for row, other in pairs:
            by_round.setdefault(row["round"], []).append(row["ms"] / other["ms"])
        gains = [statistics.fmean(each) for each in by_round.values()]
        gain = Estimate.of(gains, statistics.fmean)
        kept = [f"{100 * each / simulated:.1f}" for each in (gain.value, gain.low, gain.high)]
        cells = [
            name,
            f"{statistics.median(row['ms'] for row in own):.0f}",
            f"{statistics.median(row['simulated_ms'] for row in own):.0f}",
            f"{gain.value:.3f} ({gain.low:.3f} to {gain.high:.3f})",
            f"{simulated:.3f}",
            f"{kept[0]} % ({kept[1]} to {kept[2]})" if name != "zbv planned" else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser(prog="python -m tools.benchmarks.unequal_real", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="rounds that count (default %(default)s)")
    parser.add_argument("--batches", type=int, default=4, help="global batches per round (default %(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=6, help="microbatches per batch (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    args = parser.parse_args(argv)
    sizes = replace(Sizes(), seq_length=512, micro_batch_size=1)
    batches = batches_of(args.batches, args.num_microbatches, sizes.seq_length)
    ranks = run_on_ranks(serve, NUM_RANKS, sizes, batches, args.rounds)
    rows = rows_of(ranks, num_batches=args.batches, usual_tokens=sizes.seq_length)
    result = {
        "format": FORMAT,
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "num_microbatches": args.num_microbatches,
        "num_batches": args.batches,
        "rounds": args.rounds,
        "lengths": batches,
        "rows": rows,
    }
    if args.json:
        write_json(result, args.json)
    sys.stdout.write(table(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
