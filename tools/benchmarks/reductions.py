"""What reductions of gradients over replicas add to an iteration, simulated and emulated: behind the last W, and beside the tail.

Emulated ranks are processes whose passes sleep, with the real executor and messages on gloo. Each reduces its buckets by a thread
that sleeps: one after another, each as soon as its gradients are final. Stock 1F1B has the same buckets. Buckets become complete
evenly along the ops in which `mcore.ddp` makes gradients final.

With --replicas there are that many pipelines, and the thread all-reduces every bucket over them on gloo; between iterations ranks
all-reduce a norm and sleep for an optimizer step, each for its own time. A few iterations are recorded, as a training run records
them, the costs around the passes are read from the recordings, and what the simulator predicts with them is compared with further
iterations that nothing records.

  python -m tools.benchmarks.reductions --num-ranks 4 --num-microbatches 8 --unit-ms 40
  python -m tools.benchmarks.reductions --num-ranks 2 --replicas 2 --json docs/benchmarks/data/step.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import pairwise
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.plan.communication import Program, place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Op, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.tail import Tail, complete_in, reduced_ms, tail_of
from megatron.zerobubble.plan.timeline import Activity, Bucket, RankTimeline, Timeline
from megatron.zerobubble.plan.transforms import reductions_beside_tail
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.profiling.report import report
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from tools.benchmarks.emulation import Sleeper, SleepingWork, run_on_ranks
from tools.benchmarks.reports import Row, markdown_table, origin, write_json

__all__ = ["Finals", "exposed_ms"]

SCHEDULES = ("zb-h1", "zb-h2", "zbv", "v-half")


class Finals(Enum):
    """Along which ops of a stage its gradients become final."""

    LAST_OP = auto()
    """The last W or full backward, as where Ws run one by one."""
    TAIL = auto()
    """Those that `tail_of` names."""

    def tail(self, plan: Plan, rank: int) -> Tail:
        """How the last Ws of a rank run."""
        return tail_of(plan.ops[rank]) if self is Finals.TAIL else Tail()


def exposed_ms(plan: Plan, costs: CostModel, finals: Finals) -> float:
    """By how much the last reduction ends behind the last op, under costs with reductions."""
    assert costs.step is not None
    rows = simulate(plan, costs).rows
    reduced = (reduced_ms(row, costs.step, finals.tail(plan, rank)) for rank, row in enumerate(rows))
    return max(reduced) - max(row[-1].end_ms for row in rows)


# -- emulated -------------------------------------------------------------------------------------------------------------

Job = tuple[Program, CostModel, Finals]
"""What ranks run: a plan with its transfers, its costs with reductions, and when gradients are final."""
Complete = dict[Op, list[tuple[float, Bucket]]]
"""An op -> the buckets that become complete in it, each after how many milliseconds of it."""


def complete_buckets(job: Job, rank: int, num_bytes: int = 0) -> Complete:
    """When the buckets of a rank become complete."""
    program, costs, finals = job
    assert costs.step is not None
    row, found = simulate(program.plan, costs).rows[rank], Complete()
    for stage in program.plan.placement.rank_to_stages[rank]:
        for index, (op, after) in enumerate(
            complete_in(row, stage, costs.step.reduce_ms[stage], finals.tail(program.plan, rank))
        ):
            found.setdefault(op, []).append((after, Bucket(stage=stage, index=index, num_bytes=num_bytes)))
    return found


class ReducingWork(SleepingWork):
    """Passes that sleep, and a thread that reduces buckets.

    Args:
        costs: times of each stage's passes.
        complete: in which op buckets are complete, and after how many milliseconds of it.
        reduce: called by the thread for a bucket, with the time of `time.perf_counter` at which it is complete, which may be in
            the future; returns when it is reduced.
    """

    def __init__(self, costs: CostModel, complete: Complete, reduce: Callable[[float, Bucket], None]) -> None:
        super().__init__(costs)
        self._complete, self._reduce = complete, reduce
        self._ready: SimpleQueue[tuple[float, Bucket] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._reduce_all, daemon=True)
        self._thread.start()

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor:
        """Sleep for the time of B or BW."""
        self._begin(op)
        return super().backward(op, gradient, last)

    def weight_gradient(self, op: Op, last: bool) -> None:
        """Sleep for the time of W."""
        self._begin(op)
        super().weight_gradient(op, last)

    def join(self) -> None:
        """Return when all reductions have ended."""
        self._ready.put(None)
        self._thread.join()

    def _begin(self, op: Op) -> None:
        now = time.perf_counter()
        for after_ms, bucket in self._complete.get(op, ()):
            self._ready.put((now + after_ms / 1000.0, bucket))

    def _reduce_all(self) -> None:
        while (ready := self._ready.get()) is not None:
            self._reduce(*ready)


def sleeping(bucket_s: float) -> Callable[[float, Bucket], None]:
    """Reductions that sleep, one after another, each for this many seconds."""
    sleeper, end_s = Sleeper(), 0.0

    def reduce(ready_s: float, bucket: Bucket) -> None:
        nonlocal end_s
        end_s = max(end_s, ready_s) + bucket_s
        sleeper.sleep_until(end_s)
        end_s = max(end_s, time.perf_counter())

    return reduce


def emulate(rank: int, jobs: Sequence[Job], reduction_ms: float, rounds: int) -> list[list[tuple[float, float]]]:
    """For each job and round, when this rank's iteration began and ended with its reductions, in seconds."""
    results: list[list[tuple[float, float]]] = [[] for _ in jobs]
    device = torch.device("cpu")
    for _ in range(rounds):
        for job, times in zip(jobs, results, strict=True):
            program, costs, _ = job
            plan, complete = program.plan, complete_buckets(job, rank)
            links = ProcessGroupLinks(plan.placement, pipeline=range(plan.num_ranks), rank=rank, device=device)
            bucket_s = reduction_ms / 1000.0 / sum(map(len, complete.values()))
            work = ReducingWork(costs, complete, sleeping(bucket_s))
            executor = Executor(program, rank, links, work)
            dist.barrier()
            begin_s = time.perf_counter()
            executor.run()
            work.join()
            times.append((begin_s, time.perf_counter()))
            dist.barrier()
            links.close()
    return results


class Replica:
    """One rank of one of several pipelines, whose iterations end with an optimizer step.

    Args:
        rank: of the world, whose pipelines have consecutive ranks.
        job: what it runs.
        num_replicas: pipelines.
        bucket_bytes: size of every bucket of gradients.
    """

    def __init__(self, rank: int, job: Job, num_replicas: int, bucket_bytes: int) -> None:
        self._program, self._costs, _ = job
        plan = self._program.plan
        p, device = plan.num_ranks, torch.device("cpu")
        pipeline, self._rank = divmod(rank, p)
        groups = [dist.new_group([other * p + own for other in range(num_replicas)]) for own in range(p)]
        self._group = groups[self._rank]
        self._links = ProcessGroupLinks(
            plan.placement, pipeline=range(pipeline * p, (pipeline + 1) * p), rank=self._rank, device=device
        )
        self._complete = complete_buckets(job, self._rank, bucket_bytes)
        self._gradients, self._norm = torch.zeros(bucket_bytes // 4), torch.zeros(1)
        self._sleeper, self._reducing = Sleeper(), Sleeper()
        self._recorder = OpRecorder(device)

    def iterate(self, *, is_recorded: bool) -> RankTimeline | None:
        """One iteration, and its timeline if it is recorded."""
        recorder, step = self._recorder, self._costs.step
        assert step is not None
        if is_recorded:
            recorder.clear()
        work = ReducingWork(self._costs, self._complete, self._reduce)
        Executor(self._program, self._rank, self._links, work, recorder if is_recorded else None).run()
        with recorder.span(Activity.GRADIENTS):
            work.join()
        with recorder.span(Activity.OPTIMIZER):
            dist.all_reduce(self._norm)
            self._sleeper.sleep_until(time.perf_counter() + step.optimizer_ms[self._rank] / 1000.0)
        recorder.pause()
        return recorder.timeline() if is_recorded else None

    def _reduce(self, ready_s: float, bucket: Bucket) -> None:
        self._reducing.sleep_until(ready_s)
        exchange = self._recorder.exchange(Activity.REDUCE, bucket)
        dist.all_reduce(self._gradients, group=self._group)
        if exchange is not None:
            exchange.over()

    def close(self) -> None:
        """Destroy the groups of the links."""
        self._links.close()


def iterate(
    rank: int, jobs: Sequence[Job], num_replicas: int, bucket_bytes: int, num_recorded: int, num_timed: int
) -> list[tuple[list[RankTimeline], list[float]]]:
    """For each job, this rank's recorded iterations, and the milliseconds of every other one."""
    results = []
    for job in jobs:
        replica = Replica(rank, job, num_replicas, bucket_bytes)
        replica.iterate(is_recorded=False)  # the first opens connections
        recorded = [found for _ in range(num_recorded) if (found := replica.iterate(is_recorded=True)) is not None]
        marks = []
        for _ in range(num_timed + 1):
            replica.iterate(is_recorded=False)
            marks.append(time.perf_counter())
        dist.barrier()
        replica.close()
        results.append((recorded, [1000.0 * (after - before) for before, after in pairwise(marks)]))
    return results


def predicted(plan: Plan, recorded: Sequence[Sequence[RankTimeline]]) -> tuple[CostModel, float]:
    """The costs in recorded iterations of a pipeline, the medians, and the iteration time that follows.

    Args:
        plan: what ran.
        recorded: per rank of the pipeline its timelines.
    """
    timelines = [Timeline(iteration=1, plan=plan, ranks=ranks) for ranks in zip(*recorded, strict=True)]
    each = [report(timeline).simulation.costs for timeline in timelines]

    def medians(name: str) -> list[float]:
        return [statistics.median(values) for values in zip(*(costs.lists[name] for costs in each), strict=True)]

    costs = CostModel.of_lists(
        {name: medians(name) for name in COST_LISTS}, comm_ms=statistics.median(costs.comm_ms for costs in each)
    )
    steps = [costs.step for costs in each if costs.step is not None]
    costs = replace(costs, step=StepCosts.typical(steps, statistics.median))
    step = simulate(plan, costs).step
    assert step is not None
    return costs, step.makespan_ms


def predict(args: argparse.Namespace, names: Sequence[str], jobs: Sequence[Job]) -> None:
    """Compare predictions from recorded iterations with iterations that are not recorded."""
    sizes = args.replicas, round(args.bucket_mb * 1e6), args.recorded, args.rounds
    ranks, rows = run_on_ranks(iterate, args.replicas * args.num_ranks, jobs, *sizes), list[Row]()
    for number, (name, (program, _, _)) in enumerate(zip(names, jobs, strict=True)):
        costs, expected = predicted(program.plan, [rank[number][0] for rank in ranks[: args.num_ranks]])
        assert costs.step is not None
        measured = statistics.median(statistics.median(rank[number][1]) for rank in ranks)
        passes = simulate(program.plan, costs).makespan_ms
        reductions = [sum(map(sum, (costs.step.reduce_ms[s] for s in own))) for own in program.plan.placement.rank_to_stages]
        rows.append({"schedule": name, "passes_ms": passes, "reduce_ms": reductions, "optimizer_ms": costs.step.optimizer_ms})
        rows[-1] |= {"predicted_ms": expected, "measured_ms": measured, "difference": measured / expected - 1}
    if args.json is not None:
        write_json(origin() | {"settings": {**vars(args), "json": None}, "schedules": rows}, args.json)
    table = [
        [
            str(row["schedule"]),
            f"{row['passes_ms']:.1f}",
            f"{max(row['reduce_ms']):.1f}",
            f"{max(row['optimizer_ms']):.1f}",
            f"{row['predicted_ms']:.1f}",
            f"{row['measured_ms']:.1f}",
            f"{100 * row['difference']:+.1f} %",
        ]
        for row in rows
    ]
    header = ["schedule", "passes ms", "reduction ms", "optimizer ms", "predicted ms", "measured ms", "difference"]
    print("\n".join(markdown_table(header, table)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=40.0, help="time of F, B and W of all layers of a rank")
    parser.add_argument("--reduction", type=float, default=4.0, help="of all gradients of a rank, in units")
    parser.add_argument("--num-buckets", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="with --replicas: iterations that are timed")
    parser.add_argument("--replicas", type=int, default=1, help="pipelines that reduce their gradients on gloo")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="size of a bucket that replicas reduce")
    parser.add_argument("--recorded", type=int, default=5, help="iterations that replicas record")
    parser.add_argument("--json", metavar="FILE", help="with --replicas: write the table")
    args = parser.parse_args(argv)
    reduction_ms = args.reduction * args.unit_ms
    names, jobs = list[str](), list[Job]()
    for name in ("1f1b", *SCHEDULES):
        plan = build_plan(name, num_ranks=args.num_ranks, num_microbatches=args.num_microbatches)
        unit = args.unit_ms
        costs = CostModel.uniform(plan.placement, forward_ms=unit, backward_ms=unit, wgrad_ms=unit)
        step = StepCosts.uniform(plan.placement, reduce_ms=reduction_ms, num_buckets=args.num_buckets)
        if args.replicas > 1:  # the last rank has most to do
            step = replace(step, optimizer_ms=tuple(unit * (1 + rank) / args.num_ranks for rank in range(args.num_ranks)))
        for finals in Finals if name != "1f1b" and args.replicas == 1 else (Finals.TAIL,):
            ordered = reductions_beside_tail(plan) if finals is Finals.TAIL else plan
            names.append(f"{name}, {finals.name.lower().replace('_', ' ')}" if args.replicas == 1 else name)
            jobs.append((place_communication(ordered), replace(costs, step=step), finals))
    if args.replicas > 1:
        predict(args, names, jobs)
        return 0
    ranks = run_on_ranks(emulate, args.num_ranks, jobs, reduction_ms, args.rounds)
    rows = []
    for number, (name, (program, costs, finals)) in enumerate(zip(names, jobs, strict=True)):
        exposed = exposed_ms(program.plan, costs, finals)
        expected = simulate(program.plan, costs).makespan_ms + exposed
        rounds = zip(*(rank[number] for rank in ranks), strict=True)
        spans = [1000.0 * (max(end for _, end in each) - min(begin for begin, _ in each)) for each in rounds]
        median = statistics.median(spans)
        rows.append([name, f"{exposed:.1f}", f"{expected:.1f}", f"{median:.1f}", f"{100 * (median / expected - 1):+.1f} %"])
    print("\n".join(markdown_table(["schedule", "exposed ms", "iteration, simulated ms", "emulated ms", "difference"], rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
