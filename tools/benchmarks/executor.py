"""Measure the overhead of the executor: Python time per op beyond the op's own work.

One process plays each rank of the pipeline in turn. Nothing is computed and nothing is transferred; what remains is overhead.
There are six layers, each a line of the result, in microseconds per op:

  executor       the walk over the ops; links and work do nothing
  timed          the same while passes are timed for planning
  watched        "executor" with the reports that the watchdog reads, which is on in pretrain_gpt.py and under zerobubble run
  run            "watched" with the store of weight gradients: B puts one linear's, W takes it, and the kernel does nothing. What
                 this package adds to each op of a run
  process group  the same through ProcessGroupLinks, over torch's backend "fake": adds the Python of isend and irecv
  model          the same as "executor", with ops that run a tiny linear through megatron-core's own forward_step and
                 backward_step, less the time of those two for the unsplit linear without an executor

Time is CPU time of the thread, so that other processes do not count. Every rank is measured; the table shows the slowest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import UserError
from megatron.zerobubble.plan.communication import Message, Program, place_communication
from megatron.zerobubble.plan.ir import Op, OpKind, Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.runtime.executor import Executor, StageWork
from megatron.zerobubble.runtime.p2p import P2PLinks, ProcessGroupLinks
from megatron.zerobubble.runtime.recording import Recorder
from megatron.zerobubble.runtime.watch import Watch
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore
from tools.benchmarks.reports import origin, write_json

FORMAT = "zerobubble-executor-benchmark/1"
SHAPE = (4, 1, 8)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Measurement:
    """Microseconds per op of one layer on one rank, over the repeats."""

    schedule: str
    layer: str
    rank: int
    num_ops: int
    min_us: float
    median_us: float
    max_us: float


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


def measure_executor(
    program: Program,
    rank: int,
    links: P2PLinks,
    layer: str,
    repeats: int,
    recorder: Recorder | None = None,
    work: StageWork | None = None,
) -> Measurement:
    """Measure the executor with empty ops; with `recorder`, what that takes for each of them, too."""
    executor = Executor(program, rank, links, work or EmptyWork(), recorder)
    num_ops = len(program.steps[rank])
    return summary(program, layer, rank, [sample / num_ops for sample in timed(executor.run, repeats)])


def timing_profiler() -> Profiler:
    """A `Profiler` behind its first iteration, which measures memory: it times the next ones."""
    profiler = Profiler(CPU)
    with profiler:
        pass
    return profiler


def summary(program: Program, layer: str, rank: int, samples: Sequence[float]) -> Measurement:
    """Summarize the samples of one rank and layer."""
    rounded = [round(sample, 2) for sample in (min(samples), statistics.median(samples), max(samples))]
    return Measurement(program.plan.schedule, layer, rank, len(program.steps[rank]), *rounded)


def measure_process_group(program: Program, repeats: int) -> list[Measurement]:
    """Measure `ProcessGroupLinks` on every rank; the fake backend accepts every message and transfers none."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    num_ranks, results = program.plan.num_ranks, []
    for rank in range(num_ranks):
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        try:
            links = ProcessGroupLinks(program.plan.placement, pipeline=range(num_ranks), rank=rank, device=CPU)
            results.append(measure_executor(program, rank, links, "process group", repeats))
            links.close()
        finally:
            dist.destroy_process_group()
    return results


def measure_model(program: Program, rank: int, repeats: int) -> Measurement:
    """Measure ChunkWork with the split linear, less the time of megatron-core's own passes with the unsplit linear.

    `rank` must hold neither the first nor the last stage, which compute more.
    """
    from megatron.zerobubble.mcore.cpu.device import HostDevice

    num_ops, samples = len(program.steps[rank]), []
    with HostDevice(), warnings.catch_warnings():
        # megatron-core warns on import and on every config about what is deprecated or not installed.
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")
        model = Passes(program, rank)
        for _ in range(repeats):  # both close in time, so that the CPU's state is the same; best of three, as it is a difference
            samples.append((min(timed(model.ours, 3)) - min(timed(model.stock, 3))) / num_ops)
    return summary(program, "model", rank, samples)


class Passes:
    """One rank's iteration over tiny linears: through the executor, and by megatron-core's own two functions alone."""

    def __init__(self, program: Program, rank: int) -> None:
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer import TransformerConfig

        from megatron.zerobubble.mcore.compat import backward_step
        from megatron.zerobubble.mcore.stage_work import ChunkWork, Iteration
        from megatron.zerobubble.wgrad.gemm import choose_kernel
        from megatron.zerobubble.wgrad.store import WeightGradStore

        self.program, self.rank = program, rank
        self.schedules, self.backward_step, self.chunk_work = schedules, backward_step(), ChunkWork
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=SHAPE[-1],
            num_attention_heads=1,
            pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=True,
        )
        self.iteration = Iteration(
            forward_step_func=lambda iterator, model: (model.forward(), None),
            data_iterators=[None] * program.plan.placement.num_chunks,
            num_microbatches=program.plan.num_microbatches,
            tensor_shapes=[SHAPE] * program.plan.num_microbatches,
            output_lengths=[1] * program.plan.placement.num_stages,
            order=range(program.plan.num_microbatches),
            forward_only=False,
            collect_non_loss_data=False,
            first_val_step=None,
            context_parallel_size=1,
        )
        kernel = choose_kernel(CPU, input_dtype=torch.float32, accumulator_dtype=torch.float32)
        self.store = WeightGradStore(kernel, rank=rank)
        self.split = [TinyLinear(self.store) for _ in program.plan.placement.rank_to_stages[rank]]
        self.plain = TinyLinear(None)
        self.activation, self.gradient = torch.zeros(SHAPE), torch.zeros(SHAPE)

    def ours(self) -> None:
        """Run the executor, ChunkWork, the store and the split linear."""
        work = self.chunk_work(self.split, self.program.plan.placement, self.store, self.config, self.iteration, CPU)
        Executor(self.program, self.rank, InstantLinks(), work).run()
        work.finish()

    def stock(self) -> None:
        """Run the same number of forward and full backward passes, with nothing around them."""
        losses: list[Any] = []
        for microbatch in range(self.iteration.num_microbatches * len(self.split)):
            activation = torch.empty(SHAPE).requires_grad_()
            output, _ = self.schedules.forward_step(
                self.iteration.forward_step_func,
                None,
                self.plain,
                self.iteration.num_microbatches,
                activation,
                losses,
                self.config,
                cp_group_size=1,
                is_first_microbatch=microbatch == 0,
                current_microbatch=microbatch,
                is_last_stage=False,
            )
            self.schedules.deallocate_output_tensor(output, True)
            self.backward_step(activation, output, self.gradient, config=self.config)


class TinyLinear(torch.nn.Module):
    """The smallest model chunk that megatron-core's passes accept. Its wgrad is deferred to `store` if there is one."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        from megatron.zerobubble.wgrad.linear import LinearSplit, split_linear
        from megatron.zerobubble.wgrad.split_weight import SplitWeight

        self.weight = torch.nn.Parameter(torch.zeros(SHAPE[-1], SHAPE[-1]))
        self.decoder = None
        self.input: Tensor | None = None
        self._split = None if store is None else LinearSplit(SplitWeight("weight", self.weight), store)
        self._split_linear = split_linear

    def set_input_tensor(self, tensors: list[Tensor]) -> None:
        """Set the input, as megatron-core does for a chunk."""
        (self.input,) = tensors

    def forward(self) -> Tensor:
        """Apply the linear."""
        assert self.input is not None
        if self._split is None:
            return torch.nn.functional.linear(self.input, self.weight)
        return self._split_linear(self.input, self.weight, None, self._split)


def benchmark(schedule: str, args: argparse.Namespace) -> list[Measurement]:
    """Measure all layers for one schedule."""
    program = place_communication(build_plan(schedule, num_ranks=args.num_ranks, num_microbatches=args.num_microbatches))
    ranks = range(args.num_ranks)
    results = [measure_executor(program, rank, InstantLinks(), "executor", args.repeats) for rank in ranks]
    results += [measure_executor(program, rank, InstantLinks(), "timed", args.repeats, timing_profiler()) for rank in ranks]
    results += [measure_executor(program, rank, InstantLinks(), "watched", args.repeats, Watch(CPU)) for rank in ranks]
    placement = program.plan.placement
    results += [
        measure_executor(program, rank, InstantLinks(), "run", args.repeats, Watch(CPU), StoredWork(placement)) for rank in ranks
    ]
    results += measure_process_group(program, args.repeats)
    last = program.plan.num_stages - 1
    inner = [rank for rank in ranks if not {0, last} & set(program.plan.placement.rank_to_stages[rank])]
    if inner and not args.without_model:
        results.append(measure_model(program, inner[len(inner) // 2], args.repeats))
    return results


def slowest(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The rank with the largest median for each schedule and layer, in the order measured."""
    worst: dict[tuple[str, str], Measurement] = {}
    for measurement in measurements:
        key = measurement.schedule, measurement.layer
        if key not in worst or worst[key].median_us < measurement.median_us:
            worst[key] = measurement
    return list(worst.values())


def table(measurements: Sequence[Measurement]) -> str:
    """A plain text table of the slowest ranks."""
    lines = [f"{'schedule':18}{'layer':15}{'rank':>5}{'ops':>6}{'min':>9}{'median':>9}{'max':>9}   us/op"]
    for row in slowest(measurements):
        lines.append(
            f"{row.schedule:18}{row.layer:15}{row.rank:5}{row.num_ops:6}{row.min_us:9.2f}{row.median_us:9.2f}{row.max_us:9.2f}"
        )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", action="append", help="repeat for several (default: 1f1b, zb-h1, zb-h2, zbv)")
    parser.add_argument("--num-ranks", type=int, default=8, help="pipeline ranks, p (default %(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=64, help="m (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=21, help="iterations measured per rank (default %(default)s)")
    parser.add_argument("--without-model", action="store_true", help="skip the layer 'model'; megatron-core is not imported")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    torch.set_num_threads(1)
    try:
        measurements = [
            row
            for schedule in track(args.schedule or ("1f1b", "zb-h1", "zb-h2", "zbv"), "schedules")
            for row in benchmark(schedule, args)
        ]
    except UserError as error:
        parser.error(str(error))
    print(table(measurements))
    if args.json:
        about = {name: getattr(args, name) for name in ("num_ranks", "num_microbatches", "repeats")}
        rows = {"slowest": [asdict(row) for row in slowest(measurements)], "ranks": [asdict(row) for row in measurements]}
        body = {"format": FORMAT, **about, "clock": "CPU time of the thread", "torch": torch.__version__, **origin(), **rows}
        write_json(body, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
