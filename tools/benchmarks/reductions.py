"""What reductions of gradients over replicas add to an iteration, simulated and emulated: behind the last W, and beside the tail.

Emulated ranks are processes whose passes sleep, with the real executor and messages on gloo. Each reduces its buckets by a thread
that sleeps: one after another, each as soon as its gradients are final. Stock 1F1B has the same buckets. Buckets become complete
evenly along the ops in which `mcore.ddp` makes gradients final.

  python -m tools.benchmarks.reductions --num-ranks 4 --num-microbatches 8 --unit-ms 40
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.mcore.ddp.tail import Tail, tail_of
from megatron.zerobubble.plan.communication import Program, place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import TimedOp, simulate
from megatron.zerobubble.plan.transforms import reductions_beside_tail
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from tools.benchmarks.emulation import Sleeper, SleepingWork, run_on_ranks
from tools.benchmarks.reports import markdown_table

__all__ = ["Finals", "exposed_ms", "final_ops"]

SCHEDULES = ("zb-h1", "zb-h2", "zbv", "v-half")


class Finals(Enum):
    """Along which ops of a stage its gradients become final."""

    LAST_OP = auto()
    """The last W or full backward, as where Ws run one by one."""
    TAIL = auto()
    """Those that `tail_of` names."""


def final_ops(row: Sequence[Op], stage: int, finals: Finals, chunk_of: Callable[[int], int]) -> list[Op]:
    """The ops along which the gradients of a stage become final, in their order."""
    last = [op for op in row if op.stage == stage and op.kind in (OpKind.W, OpKind.BW)][-1]
    tail = tail_of(row, chunk_of) if finals is Finals.TAIL else Tail()
    if tail.fused is not None and tail.fused.stage == stage:
        return [tail.fused, last]
    keys, _ = tail.parts.get(last, ((), 0))
    return [op for op in row if op == last or (keys and tail.parts.get(op, ((), 0))[0] == keys)]


def shares(plan: Plan, rank: int, costs: CostModel, num_buckets: int, finals: Finals) -> dict[Op, list[float]]:
    """When buckets of a rank are complete: in which op, and after how many milliseconds of it."""
    found: dict[Op, list[float]] = {}
    stages = plan.placement.rank_to_stages[rank]
    count = max(1, num_buckets // len(stages))
    for stage in stages:
        ops = final_ops(plan.ops[rank], stage, finals, plan.placement.chunk_of)
        times = [costs.duration_ms(stage, op.kind) for op in ops]
        for index in range(count):
            left, op_index = (index + 1) / count * sum(times), 0
            while op_index < len(ops) - 1 and left > times[op_index]:
                left -= times[op_index]
                op_index += 1
            found.setdefault(ops[op_index], []).append(left)
    return found


def exposed_ms(plan: Plan, costs: CostModel, reduction_ms: float, num_buckets: int, finals: Finals) -> float:
    """By how much the last reduction ends behind the last op.

    Args:
        plan: the plan that runs.
        costs: times of its passes.
        reduction_ms: of all of a rank's gradients.
        num_buckets: of a rank, over all of its stages.
        finals: when gradients are final.
    """
    ends, rows = [], simulate(plan, costs).rows
    for rank, row in enumerate(rows):
        timed: dict[Op, TimedOp] = {each.op: each for each in row}
        complete = shares(plan, rank, costs, num_buckets, finals)
        ready = sorted(timed[op].start_ms + after for op, own in complete.items() for after in own)
        end = 0.0
        for each in ready:
            end = max(end, each) + reduction_ms / len(ready)
        ends.append(end)
    return max(0.0, max(ends) - max(row[-1].end_ms for row in rows))


# -- emulated -------------------------------------------------------------------------------------------------------------


class ReducingWork(SleepingWork):
    """Passes that sleep, and a thread that sleeps for the reduction of each bucket.

    Args:
        costs: times of each stage's passes.
        complete: in which op buckets are complete, and after how many milliseconds of it.
        bucket_s: seconds that the reduction of one bucket takes.
    """

    def __init__(self, costs: CostModel, complete: dict[Op, list[float]], bucket_s: float) -> None:
        super().__init__(costs)
        self._complete, self._bucket_s = complete, bucket_s
        self._ready: SimpleQueue[float | None] = SimpleQueue()
        self.end_s = 0.0
        """When the last reduction has ended, after `join`."""
        self._thread = threading.Thread(target=self._reduce, daemon=True)
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
        for after_ms in self._complete.get(op, ()):
            self._ready.put(now + after_ms / 1000.0)

    def _reduce(self) -> None:
        sleeper, end_s = Sleeper(), 0.0
        while (ready_s := self._ready.get()) is not None:
            end_s = max(end_s, ready_s) + self._bucket_s
            sleeper.sleep_until(end_s)
            end_s = max(end_s, time.perf_counter())
        self.end_s = end_s


def emulate(
    rank: int, jobs: Sequence[tuple[Program, CostModel, Finals]], reduction_ms: float, num_buckets: int, rounds: int
) -> list[list[tuple[float, float]]]:
    """For each job and round, when this rank's iteration began and ended with its reductions, in seconds."""
    results: list[list[tuple[float, float]]] = [[] for _ in jobs]
    device = torch.device("cpu")
    for _ in range(rounds):
        for (program, costs, finals), times in zip(jobs, results, strict=True):
            plan = program.plan
            links = ProcessGroupLinks(plan.placement, pipeline=range(plan.num_ranks), rank=rank, device=device)
            complete = shares(plan, rank, costs, num_buckets, finals)
            bucket_s = reduction_ms / 1000.0 / sum(map(len, complete.values()))
            work = ReducingWork(costs, complete, bucket_s)
            executor = Executor(program, rank, links, work)
            dist.barrier()
            begin_s = time.perf_counter()
            executor.run()
            work.join()
            times.append((begin_s, max(work.end_s, time.perf_counter())))
            dist.barrier()
            links.close()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=40.0, help="time of F, B and W of all layers of a rank")
    parser.add_argument("--reduction", type=float, default=4.0, help="of all gradients of a rank, in units")
    parser.add_argument("--num-buckets", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    reduction_ms = args.reduction * args.unit_ms
    names, jobs = [], []
    for name in ("1f1b", *SCHEDULES):
        plan = build_plan(name, num_ranks=args.num_ranks, num_microbatches=args.num_microbatches)
        unit = args.unit_ms
        costs = CostModel.uniform(plan.placement, forward_ms=unit, backward_ms=unit, wgrad_ms=unit)
        for finals in Finals if name != "1f1b" else (Finals.LAST_OP,):
            ordered = reductions_beside_tail(plan) if finals is Finals.TAIL else plan
            names.append(f"{name}, {finals.name.lower().replace('_', ' ')}")
            jobs.append((place_communication(ordered), costs, finals))
    ranks = run_on_ranks(emulate, args.num_ranks, jobs, reduction_ms, args.num_buckets, args.rounds)
    rows = []
    for number, (name, (program, costs, finals)) in enumerate(zip(names, jobs, strict=True)):
        exposed = exposed_ms(program.plan, costs, reduction_ms, args.num_buckets, finals)
        expected = simulate(program.plan, costs).makespan_ms + exposed
        rounds = zip(*(rank[number] for rank in ranks), strict=True)
        spans = [1000.0 * (max(end for _, end in each) - min(begin for begin, _ in each)) for each in rounds]
        median = statistics.median(spans)
        rows.append([name, f"{exposed:.1f}", f"{expected:.1f}", f"{median:.1f}", f"{100 * (median / expected - 1):+.1f} %"])
    print("\n".join(markdown_table(["schedule", "exposed ms", "iteration, simulated ms", "emulated ms", "difference"], rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
