"""Run plans for unequal microbatches and links on the real executor, with passes that sleep, and compare with the simulator.

Eight ranks are processes on this machine. Their plans, executor, buffers, waits and messages on gloo are real; a pass sleeps for
the time that its microbatch takes. A message of a slow link is taken only when its latency has passed since it was sent. So any
number of ranks fits on a few cores, as long as nothing else runs there.

  lengths  log-normal with a coefficient of variation of 0.6, the batches of `unequal`. 1F1B and interleaved 1F1B run sorted by
           length, in the better direction; ZBV in the order of the data, and as planned. The gain is the ratio of makespans to
           that of the plan; *kept* is the measured gain over the simulated one.
  links    equal microbatches, and one slow link in the middle of the pipeline: the plan that does not know it, and the one that
           does. *Off* is the measured makespan over the simulated one, less 1.

  python -m tools.benchmarks.unequal_emulated --json docs/benchmarks/data/unequal_emulated.json
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.plan.communication import Message, place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.microbatches import MicrobatchPlanner
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import plan_of, schedule_spec
from megatron.zerobubble.plan.search.assign import assign
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import Handle, ProcessGroupLinks
from tools.benchmarks.emulation import SleepingWork, run_on_ranks
from tools.benchmarks.unequal import log_normal

FORMAT = "zerobubble-unequal-emulated-benchmark/1"
CPU = torch.device("cpu")
NUM_RANKS = 8
DEVIATION = 0.6
LINK_SHARE, SLOWER = 0.05, 10
"""Latency of a link, in times of one pass of a rank, and how many times as long the slow one takes."""
LINK_PLANS = (("zbv", 0.75), ("v-half", 0.625), ("zb", 1.0))
SPREAD = 3
"""Microbatches per rank."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A plan, and the costs of its microbatches in the order of the data."""

    name: str
    plan: Plan
    costs: CostModel


class _Delayed:
    """A receive whose message is there only when its latency has passed since it was sent."""

    def __init__(self, handle: Handle, buffer: Tensor, delay_s: float) -> None:
        self._handle, self._buffer, self._delay_s = handle, buffer, delay_s

    def wait(self) -> None:
        """Wait for the message, and then for its latency."""
        self._handle.wait()
        left = float(self._buffer[0]) + self._delay_s - time.perf_counter()  # all ranks read one clock
        if left > 0:
            time.sleep(left)


class DelayedLinks:
    """Links with latencies: the first number of a message is the time at which it was sent."""

    def __init__(self, links: ProcessGroupLinks, costs: CostModel) -> None:
        self._links, self._costs = links, costs

    def send(self, message: Message, tensor: Tensor) -> Handle:
        """Stamp and send."""
        tensor[0] = time.perf_counter()
        return self._links.send(message, tensor)

    def receive(self, message: Message, buffer: Tensor) -> Any:
        """Receive, with the latency of the link."""
        delay_s = self._costs.link_ms(message.source, message.target) / 1000.0
        return _Delayed(self._links.receive(message, buffer), buffer, delay_s)


class _Work(SleepingWork):
    """Passes that sleep for as long as their own microbatch takes. Messages are float64, to hold a time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.costs.plain)
        self._costs, self._plan = run.costs, run.plan

    def duration_s(self, op: Any) -> float:
        """The time of a pass, in seconds."""
        return self._costs.duration_ms(op.stage, op.kind, self._plan.batch_index(op.microbatch)) / 1000.0

    def empty(self) -> Tensor:
        """A message."""
        return torch.zeros(self._num_elements, dtype=torch.float64)


def serve(rank: int, runs: Sequence[Run], rounds: int) -> list[list[float]]:
    """Run one rank; per run, the seconds of each round from a common start to this rank's end. The first round does not count."""
    placements = list(dict.fromkeys(each.plan.placement for each in runs))
    links = {each: ProcessGroupLinks(each, pipeline=range(NUM_RANKS), rank=rank, device=CPU) for each in placements}
    programs = [place_communication(each.plan, costs=each.costs) for each in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    numbers = range(rounds + 1)
    for number in track(numbers, "rounds") if rank == 0 else numbers:
        for place, (run, program) in enumerate(zip(runs, programs, strict=True)):
            executor = Executor(program, rank, DelayedLinks(links[run.plan.placement], run.costs), _Work(run), OpRecorder(CPU))
            start = torch.zeros(1, dtype=torch.float64)
            if rank == 0:
                start[0] = time.perf_counter() + 0.05
            dist.broadcast(start, src=0)
            time.sleep(max(0.0, float(start) - time.perf_counter()))
            executor.run()
            if number:
                seconds[place].append(time.perf_counter() - float(start))
    for each in links.values():
        each.close()
    return seconds


def length_runs(seed: int, pass_ms: float) -> list[Run]:
    """The contenders of one batch of unequal microbatches."""
    m = SPREAD * NUM_RANKS
    tokens = log_normal(DEVIATION)(Random(seed), m)
    ascending = tuple(sorted(range(m), key=tokens.__getitem__))

    def costs_of(placement: Placement) -> CostModel:
        uniform = CostModel.uniform(placement, forward_ms=pass_ms, backward_ms=pass_ms, wgrad_ms=pass_ms)
        mean, squares = statistics.fmean(tokens), statistics.fmean(count * count for count in tokens)
        return CostModel.of_microbatches(LengthModel.of(uniform, tokens=mean, squares=squares).costs(tokens))

    def run(name: str, schedule: str, assignments: Sequence[tuple[int, ...]]) -> Run:
        plan = plan_of(schedule_spec(schedule, num_ranks=NUM_RANKS), m)
        costs = costs_of(plan.placement)
        plans = [replace(plan, assignment=assignment) for assignment in assignments]
        return Run(name=name, plan=min(plans, key=lambda each: simulate(each, costs).makespan_ms), costs=costs)

    both = (ascending, ascending[::-1])
    zbv = schedule_spec("zbv", num_ranks=NUM_RANKS)
    costs = costs_of(zbv.placement)
    planned = MicrobatchPlanner(zbv, m, options=SearchOptions(objective=Objective.MAKESPAN, budget=1e6)).plan(costs)
    return [
        run("1f1b sorted", "1f1b", both),
        run("interleaved sorted", "interleaved-1f1b", both),
        run("zbv as it comes", "zbv", [()]),
        Run(name="zbv planned", plan=planned, costs=costs),
    ]


def link_runs(pass_ms: float) -> list[Run]:
    """Plans that do not know of the slow link, and plans that do."""
    m, usual = SPREAD * NUM_RANKS, LINK_SHARE * pass_ms
    runs = []
    rows = [[usual] * NUM_RANKS for _ in range(NUM_RANKS)]
    middle = NUM_RANKS // 2
    rows[middle - 1][middle] = rows[middle][middle - 1] = SLOWER * usual
    for name, limit in LINK_PLANS:
        spec = schedule_spec(name, num_ranks=NUM_RANKS)
        equal = CostModel.uniform(spec.placement, forward_ms=pass_ms, backward_ms=pass_ms, wgrad_ms=pass_ms, comm_ms=usual)
        slow = replace(equal, links=Links(latency_ms=tuple(map(tuple, rows))))
        options = SearchOptions(memory_limit=limit, budget=2e6, objective=Objective.MAKESPAN)
        unaware = plan_of(spec, m, costs=equal, options=options)
        runs.append(Run(name=f"{name}@{limit:g} does not know", plan=unaware, costs=slow))
        runs.append(Run(name=f"{name}@{limit:g} knows", plan=assign([unaware], slow, options), costs=slow))
    return runs


def rows_of(runs: Sequence[Run], ranks: Sequence[list[list[float]]]) -> list[dict[str, Any]]:
    """Per run the makespan of each round, in milliseconds, and the simulated one."""
    return [
        {
            "name": run.name,
            "ms": [1000.0 * max(each) for each in zip(*(seconds[place] for seconds in ranks), strict=True)],
            "simulated_ms": simulate(run.plan, run.costs).makespan_ms,
        }
        for place, run in enumerate(runs)
    ]


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"{result['machine']}, {NUM_RANKS} ranks, {SPREAD * NUM_RANKS} microbatches, passes of {result['pass_ms']:g} ms, "
        f"{result['rounds']} rounds.",
        "",
        "| batch | contender | makespan, ms | simulated, ms | off | gain of the plan | simulated | kept |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for batch in result["lengths"]:
        planned = batch["rows"][-1]
        for row in batch["rows"]:
            gains = [a / b for a, b in zip(row["ms"], planned["ms"], strict=True)]
            gain, simulated = statistics.median(gains), row["simulated_ms"] / planned["simulated_ms"]
            cells = [
                batch["seed"],
                row["name"],
                *_cells(row),
                f"{gain:.3f}",
                f"{simulated:.3f}",
                f"{100 * gain / simulated:.1f} %",
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| links | makespan, ms | simulated, ms | off |", "| --- | --- | --- | --- |"]
    for row in result["links"]:
        lines.append(f"| {' | '.join([row['name'], *_cells(row)])} |")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    """Measured and simulated makespan, and how far they are from each other."""
    measured, simulated = statistics.median(row["ms"]), row["simulated_ms"]
    return [f"{measured:.0f}", f"{simulated:.0f}", f"{100 * (measured / simulated - 1):.1f} %"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser(prog="python -m tools.benchmarks.unequal_emulated", description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=3, help="batches of lengths (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default %(default)s)")
    parser.add_argument("--pass-ms", type=float, default=20.0, help="mean time of a pass of a rank (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    args = parser.parse_args(argv)
    batches = [
        {"seed": seed, "rows": rows_of(runs, run_on_ranks(serve, NUM_RANKS, runs, args.rounds))}
        for seed in range(args.batches)
        for runs in [length_runs(seed, args.pass_ms)]
    ]
    runs = link_runs(args.pass_ms)
    result = {
        "format": FORMAT,
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "pass_ms": args.pass_ms,
        "rounds": args.rounds,
        "lengths": batches,
        "links": rows_of(runs, run_on_ranks(serve, NUM_RANKS, runs, args.rounds)),
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(table(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
