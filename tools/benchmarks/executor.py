"""Measure the overhead of the executor: Python time per op beyond the op's own work.

One process plays each rank of the pipeline in turn. Nothing is computed and nothing is transferred; what remains is overhead.
There are three layers, each a line of the result, in microseconds per op:

  executor       the walk over the ops; links and work do nothing
  watched        the same with the reports that the watchdog reads, which is on in pretrain_gpt.py and under zerobubble run
  run            "watched" with the store of weight gradients: B puts one linear's, W takes it, and the kernel does nothing. What
                 this package adds to each op of a run

Time is CPU time of the thread, so that other processes do not count. Every rank is measured; the table shows the slowest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.communication import Message, Program, place_communication
from megatron.zerobubble.plan.ir import Op, OpKind, Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.runtime.executor import Executor, StageWork
from megatron.zerobubble.runtime.watch import Watch
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore
from tools.benchmarks.reports import ROOT, Row, markdown_table, origin, run_report, with_tables

FORMAT = "zerobubble-executor-benchmark/1"
PAGE = ROOT / "docs" / "benchmarks" / "executor.md"
SHAPE = (4, 1, 8)
CPU = torch.device("cpu")


class InstantLinks:
    """`P2PLinks` whose transfers complete at once; also their handle."""

    def send(self, message: Message, tensor: Tensor) -> InstantLinks:
        """Transfer nothing."""
        return self

    def receive(self, message: Message, buffer: Tensor) -> InstantLinks:
        """Transfer nothing."""
        return self

    def wait(self) -> None:
        """Return at once."""


class EmptyWork(StageWork):
    """A `StageWork` whose ops do nothing and always return the same tensor."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(SHAPE)

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor:
        """Return the tensor for F."""
        return self.tensor

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor:
        """Return the tensor for B or BW."""
        return self.tensor

    def weight_gradient(self, op: Op, last: bool) -> None:
        """Do nothing for W."""

    def buffer(self, message: Message) -> Tensor:
        """Return the tensor; allocates nothing."""
        return self.tensor


class StoredWork(EmptyWork):
    """`EmptyWork` with the store: each B leaves the weight gradient of one linear, and its W takes it."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.store = WeightGradStore(WgradKernel(KernelKind.PLAIN, lambda *_: None))
        self.placement, self.rows = placement, self.tensor.view(-1, SHAPE[-1])
        weights = (torch.nn.Parameter(torch.zeros(SHAPE[-1], SHAPE[-1])) for _ in range(placement.num_chunks))
        self.splits = [SplitWeight("weight", weight) for weight in weights]

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor:
        """Leave a weight gradient; with BW compute it."""
        chunk = self.placement.chunk_of(op.stage)
        self.store.begin(chunk, op.microbatch, fused=op.kind is OpKind.BW)
        self.store.put(self.splits[chunk], self.rows, self.rows)
        self.store.end()
        return self.tensor

    def weight_gradient(self, op: Op, last: bool) -> None:
        """Take the weight gradient that B left."""
        self.store.run(self.placement.chunk_of(op.stage), op.microbatch)


def timed(run: Callable[[], Any], repeats: int) -> list[float]:
    """CPU time of each of `repeats` calls in microseconds, after one call that does not count."""
    run()
    samples = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        run()
        samples.append((time.thread_time_ns() - start) / 1000.0)
    return samples


def measured(program: Program, repeats: int) -> list[Row]:
    """A row per layer and rank."""
    layers: dict[str, Callable[[int], Executor]] = {
        "executor": lambda rank: Executor(program, rank, InstantLinks(), EmptyWork()),
        "watched": lambda rank: Executor(program, rank, InstantLinks(), EmptyWork(), Watch(CPU)),
        "run": lambda rank: Executor(program, rank, InstantLinks(), StoredWork(program.plan.placement), Watch(CPU)),
    }
    rows = []
    for layer, made in layers.items():
        for rank in range(program.plan.num_ranks):
            num_ops = len(program.steps[rank])
            samples = [sample / num_ops for sample in timed(made(rank).run, repeats)]
            row: Row = {"schedule": program.plan.schedule, "layer": layer, "rank": rank, "num_ops": num_ops}
            values = {"min_us": min(samples), "median_us": statistics.median(samples), "max_us": max(samples)}
            rows.append(row | {name: round(value, 2) for name, value in values.items()})
    return rows


def benchmark(args: argparse.Namespace) -> Row:
    """Measure all layers for each schedule."""
    if args.repeats < 1:
        raise ConfigError("--repeats must be 1 or more")
    torch.set_num_threads(1)
    rows = []
    for schedule in track(args.schedule or ("1f1b", "zb-h1", "zb-h2", "zbv"), "schedules"):
        plan = build_plan(schedule, num_ranks=args.num_ranks, num_microbatches=args.num_microbatches)
        rows += measured(place_communication(plan), args.repeats)
    about = {name: getattr(args, name) for name in ("num_ranks", "num_microbatches", "repeats")}
    found = {"slowest": slowest(rows), "ranks": rows}
    return about | {"clock": "CPU time of the thread", "torch": torch.__version__} | origin() | found


def slowest(rows: Sequence[Row]) -> list[Row]:
    """The rank with the largest median for each schedule and layer, in the order measured."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["schedule"], row["layer"]
        if key not in worst or worst[key]["median_us"] < row["median_us"]:
            worst[key] = row
    return list(worst.values())


def table(report: Row) -> list[str]:
    """The slowest ranks."""
    lines = [
        [row["schedule"], row["layer"], str(row["num_ops"]), *(f"{row[name]:.1f}" for name in ("min_us", "median_us", "max_us"))]
        for row in report["slowest"]
    ]
    heads = ("schedule", "layer", "ops per rank", "min", "median", "max")
    return markdown_table(heads, lines)


def markdown(report: Row) -> str:
    """The page with its table."""
    return with_tables(PAGE, [table(report)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.executor", description=__doc__, formatter_class=raw)
    parser.add_argument("--schedule", action="append", help="repeat for several (default: 1f1b, zb-h1, zb-h2, zbv)")
    parser.add_argument("--num-ranks", type=int, default=8, help="pipeline ranks, p (default %(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=64, help="m (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=21, help="iterations measured per rank (default %(default)s)")
    return run_report(parser, argv, FORMAT, benchmark, markdown, printed=lambda report: "\n".join(table(report)))


if __name__ == "__main__":
    sys.exit(main())
