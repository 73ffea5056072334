"""Measure what post-validation saves: iteration time with and without --enable-optimizer-post-validation.

Every rank is a process on this machine. Passes sleep for the given times, so that any number of ranks fits on a few cores;
everything else is real: the plan, the executor, the transfers on gloo, the relay of the gradient statistics. Blocks of iterations
with synchronous and with optimistic steps alternate in the same processes. The simulator predicts the iteration time: with the
synchronous optimizer the makespan, with post-validation the longest rank's span. Reported is the fraction of that difference that
is reached.

  python -m tools.benchmarks.post_validation --num-ranks 8 --num-microbatches 24 --json docs/benchmarks/data/post_validation.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import UserError
from megatron.zerobubble.optimizer.post_validation import GradientStatistics, PostValidation, Relay
from megatron.zerobubble.plan.communication import Program, place_communication, speculative_forwards
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from tools.benchmarks.emulation import SleepingWork, run_on_ranks
from tools.benchmarks.reports import origin, write_json

FORMAT = "zerobubble-post-validation-benchmark/1"


class NullOptimizer:
    """A `RollbackOptimizer` without parameters: gradients are never clipped, never overflow, and a step takes no time."""

    def prepare(self) -> GradientStatistics:
        """Finite statistics."""
        return GradientStatistics((1.0,), (0.0,))

    def is_clipped(self, statistics: GradientStatistics) -> bool:
        """Always False."""
        return False

    def apply(self, statistics: GradientStatistics) -> None:
        """Do nothing."""

    def snapshot(self) -> bool:
        """Copy nothing."""
        return True

    def redo(self, statistics: GradientStatistics, *, roll_back: bool) -> None:
        """Never called."""

    def drop_snapshot(self) -> None:
        """Do nothing."""

    def note_tensors(self) -> None:
        """There are none."""

    def check_tensors(self, *, is_redone: bool) -> None:
        """There are none."""

    def finalize(self, statistics: GradientStatistics) -> None:
        """Do nothing: there is no loss scale."""

    def closers(self) -> tuple[()]:
        """No groups."""
        return ()


def iteration_ms(
    program: Program, rank: int, links: ProcessGroupLinks, work: SleepingWork, *, optimistic: bool, count: int
) -> float:
    """Mean milliseconds from the start of one iteration to the start of the next, over `count` iterations after a first one."""
    post = PostValidation(NullOptimizer(), Relay(range(program.plan.num_ranks), rank), optimistic=optimistic)
    starts = []
    dist.barrier()
    for _ in range(count + 2):
        starts.append(time.perf_counter())
        executor = Executor(program, rank, links, work)
        executor.begin(program.fence[rank])
        post.validate()
        executor.run()
        post.step()
    post.validate()
    post.close()
    return (starts[-1] - starts[1]) / count * 1000.0


def serve(rank: int, program: Program, costs: CostModel, count: int, repeats: int) -> list[tuple[float, float]]:
    """Run one rank; returns iteration times in ms, (synchronous, optimistic), of each repeat."""
    num_ranks = program.plan.num_ranks
    links = ProcessGroupLinks(program.plan.placement, pipeline=range(num_ranks), rank=rank, device=torch.device("cpu"))
    work = SleepingWork(costs)
    pairs = []
    for _ in range(repeats):
        synchronous, optimistic = (
            iteration_ms(program, rank, links, work, optimistic=optimistic, count=count) for optimistic in (False, True)
        )
        pairs.append((synchronous, optimistic))
    links.close()
    return pairs


def measure(schedule: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one schedule with synchronous and with optimistic steps; returns the row of the report, with the predictions."""
    plan = build_plan(schedule, num_ranks=args.num_ranks, num_microbatches=args.num_microbatches)
    costs = CostModel.uniform(
        plan.placement, forward_ms=args.forward_ms, backward_ms=args.backward_ms, wgrad_ms=args.wgrad_ms, comm_ms=args.comm_ms
    )
    expected = simulate(plan, costs)
    program = place_communication(plan, fence=speculative_forwards(plan))
    ranks = run_on_ranks(serve, args.num_ranks, program, costs, args.iterations, args.repeats)
    pairs = [tuple(max(rank[repeat][way] for rank in ranks) for way in (0, 1)) for repeat in range(args.repeats)]
    saved = expected.makespan_ms - expected.span_ms
    reached = [(synchronous - optimistic) / saved for synchronous, optimistic in pairs]
    return {
        "schedule": schedule,
        "simulated_makespan_ms": expected.makespan_ms,
        "simulated_span_ms": expected.span_ms,
        "synchronous_ms": [synchronous for synchronous, _ in pairs],
        "early_ms": [optimistic for _, optimistic in pairs],
        "speed_up": statistics.median(synchronous / optimistic for synchronous, optimistic in pairs),
        "simulated_speed_up": expected.makespan_ms / expected.span_ms,
        "reached": statistics.median(reached),
        "reached_least": min(reached),
        "reached_most": max(reached),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The report as a text table."""
    lines = ["schedule   speed-up   predicted   fraction of the predicted saving (median, least, most)"]
    for row in rows:
        shares = "  ".join(f"{row[key]:6.1%}" for key in ("reached", "reached_least", "reached_most"))
        lines.append(f"{row['schedule']:10} {row['speed_up']:8.4f}  {row['simulated_speed_up']:10.4f}   {shares}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", action="append", help="repeat for several (default: zb-h2, zbv)")
    parser.add_argument("--num-ranks", type=int, default=8, help="pipeline ranks, p, at least 2 (default %(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=24, help="m (default %(default)s)")
    for name, what in (("forward", "F"), ("backward", "B"), ("wgrad", "W")):
        parser.add_argument(
            f"--{name}-ms", type=float, default=20.0, help=f"{what} per rank and microbatch (default %(default)s)"
        )
    parser.add_argument("--comm-ms", type=float, default=0.0, help="P2P latency that the simulator assumes (default %(default)s)")
    parser.add_argument("--iterations", type=int, default=4, help="iterations per block (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="blocks with each kind of step (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.num_ranks < 2 or args.iterations < 1 or args.repeats < 1:
        parser.error("--num-ranks must be 2 or more, --iterations and --repeats 1 or more")
    try:
        rows = [measure(schedule, args) for schedule in track(args.schedule or ("zb-h2", "zbv"), "schedules")]
    except UserError as error:
        parser.error(str(error))
    command = ["python", "-m", "tools.benchmarks.post_validation", *(sys.argv[1:] if argv is None else argv)]
    report = {
        "format": FORMAT,
        "command": " ".join(command),
        "num_ranks": args.num_ranks,
        "num_microbatches": args.num_microbatches,
        "pass_ms": {"F": args.forward_ms, "B": args.backward_ms, "W": args.wgrad_ms},
        "torch": torch.__version__,
        "schedules": rows,
    } | origin()
    print(table(rows))
    if args.json:
        write_json(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
