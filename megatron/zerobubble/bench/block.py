"""One block of a contender on one rank: build the job, warm up, time iterations.

A contender's first block also measures what the report explains the times with. Its warm-up has one iteration without any
measurement, then `contenders.PROFILED`, after which a searched order is planned, then one in which memory is measured, and one
that is recorded. Later blocks run the plan that the first one found. The timed iterations run as in training, with nothing
attached, one after the other: all ranks enter the first together, and the last ends with its step validated.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.bench.contenders import PROFILED, WARM_UP
from megatron.zerobubble.job.failure import JobGuard, first_to_fail
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.mcore.replanner import Measured, Replanner, measured_costs
from megatron.zerobubble.mcore.state_memory import state_bytes
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.profiling.profile import unit_bytes
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer, check_data_matches
from megatron.zerobubble.training.data.samples import build_datasets, chunk_iterators, chunk_reads
from megatron.zerobubble.training.initialize import Job, choose_device, join_job
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider
from megatron.zerobubble.training.setup import build_training_state
from megatron.zerobubble.training.step import StepResult, Trainer, TrainingState, mean_losses

__all__ = ["BlockRequest", "BlockResult", "Measurements", "run_block"]


@dataclass(frozen=True, kw_only=True)
class BlockRequest:
    """What to run. The same on all ranks."""

    number: int
    """Counts the blocks of the comparison, from 0."""
    settings: Settings
    """The job under the contender."""
    is_first: bool
    """Whether it is the contender's first block, which measures and plans."""
    num_warm_up: int
    """Untimed iterations; in a first block at least `contenders.WARM_UP`."""
    num_timed: int
    """Timed iterations."""
    plan: str | None = None
    """JSON of the plan to run, which the contender's first block found."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a first block measured. Bytes are those of the rank with the most."""

    state_bytes: int
    """Weights, gradients and optimizer state."""
    activation_bytes: int
    """Peak of the memory that the passes of one iteration allocate on top."""
    allocated_bytes: int | None
    """Peak of all memory that torch's allocator had given out, in the timed iterations; None on the CPU."""
    costs: CostModel | None
    """Profiled costs of the stages; None under megatron-core's own schedules."""
    unit_bytes: float
    """Bytes of one unit of the costs' activation memory; 0 without costs."""
    timeline: Timeline | None
    """The recorded iteration; None where nothing was recorded, and on ranks other than 0."""


@dataclass(frozen=True, kw_only=True)
class BlockResult:
    """What one block found; times and bytes are those of the slowest and the fullest rank."""

    seconds: float
    """Time of all timed iterations."""
    overhead: float
    """The share of it in which a rank reported its progress instead of training."""
    loss: float
    """Mean loss per token of the last iteration."""
    num_parameters: int
    """Parameters of one data-parallel replica; tied ones count on every stage that holds them."""
    vocab_size: int
    """The tokenizer's, before padding."""
    device: str
    """The name of rank 0's device."""
    settings: Settings
    """As they ran."""
    plan: str | None
    """JSON of the plan that the timed iterations ran; None under megatron-core's own schedules."""
    measured: Measurements | None
    """None, except in a first block."""


def run_block(
    request: BlockRequest, launch: Launch, *, tick: Callable[[], None], failed: Callable[[Exception], None]
) -> BlockResult:
    """Run one block in this process, which must not have run one before. All ranks must call it.

    Args:
        request: what to run.
        launch: which rank this process is. torchrun's store must be open.
        tick: called after every iteration.
        failed: called with an exception of this rank, unless it only means that another rank is gone. Then the process ends.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = request.settings
    tokenizer = build_tokenizer(settings.tokenizer)
    check_data_matches(settings, tokenizer, is_first=launch.rank == 0)
    host = choose_device(settings, launch)
    job = join_job(settings, launch, host, name=f"block-{request.number}")
    with JobGuard(job.store, launch.rank), _reporting(job, failed):
        providers: dict[str, Any] = {"model_provider": model_provider, "forward_step_provider": forward_step_provider}
        state = build_training_state(settings, job, vocab_size=tokenizer.vocab_size, **providers)
        return _Block(state, request, launch, tick).run(tokenizer, on_gpu=not host.enabled)


@contextlib.contextmanager
def _reporting(job: Job, failed: Callable[[Exception], None]) -> Iterator[None]:
    """Report the exception of the first rank that fails."""
    try:
        yield
    except Exception as error:
        rank = job.launch.rank
        if first_to_fail(job.store, rank, f"rank {rank} failed: {error}").rank == rank:
            failed(error)
        raise


class _Metered:
    """A `PipelineSchedule` whose passes run inside a memory meter."""

    def __init__(self, schedule: Any, meter: MemoryMeter) -> None:
        self._schedule, self._meter = schedule, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def forward_backward_func(self, **arguments: Any) -> Any:
        with self._meter:
            return self._schedule.forward_backward_func(**arguments)


class _Block:
    """The iterations of one block on one rank."""

    def __init__(self, state: TrainingState, request: BlockRequest, launch: Launch, tick: Callable[[], None]) -> None:
        self._state, self._request, self._launch, self._tick = state, request, launch, tick
        self._trainer = Trainer(state)
        self._num_microbatches = state.settings.num_microbatches
        self._profiler: Profiler | None = None
        self._replanner: Replanner | None = None
        self._meter = MemoryMeter(state.device)
        self._last: StepResult | None = None
        self._costs: CostModel | None = None
        self._unit_bytes = 0.0
        self._own_seconds = 0.0
        """Time of the timed iterations that is not training: reporting progress."""
        if not request.is_first:
            state.engine.replanner = None
        elif not state.schedule.spec.is_stock:
            self._replanner = state.engine.replanner
            self._profiler = Profiler(state.device) if self._replanner is None else None
        if request.plan is not None:
            plan = Plan.from_json(request.plan)
            state.schedule.replan(lambda _: plan)

    def run(self, tokenizer: Any, *, on_gpu: bool) -> BlockResult:
        """Warm up, time, and reduce the results over all ranks."""
        request, schedule = self._request, self._state.schedule
        data_iterator = self._data(tokenizer, on_gpu=on_gpu)
        if request.is_first:
            schedule.recordings.choose({request.num_warm_up}, done=0)
        schedule.recordings.only_chosen = True
        for iteration in range(1, request.num_warm_up + 1):
            self._warm_up(iteration, data_iterator)
        self._keep(self._trainer.flush())
        timelines = schedule.timelines() if request.is_first else []
        seconds = self._timed(data_iterator)
        timeline = timelines[-1] if timelines and self._launch.rank == 0 else None
        return self._result(seconds, timeline, vocab_size=tokenizer.vocab_size)

    def _data(self, tokenizer: Any, *, on_gpu: bool) -> Any:
        settings = self._state.settings
        reads = [chunk_reads(chunk, settings) for chunk in self._state.chunks]
        datasets = build_datasets(settings, tokenizer, reads=any(reads))
        rank = parallel_state.get_data_parallel_rank()
        return chunk_iterators(datasets.train, settings, reads_by_chunk=reads, consumed=0, rank=rank, on_gpu=on_gpu)

    def _warm_up(self, iteration: int, data_iterator: Any) -> None:
        """One untimed iteration. In a first block it measures what is due in it."""
        is_first, schedule = self._request.is_first, self._state.schedule
        if self._profiler is not None:
            schedule.hooks.profiler = self._profiler if PROFILED[0] <= iteration <= PROFILED[1] else None
        trainer = self._trainer
        if is_first and iteration == WARM_UP - 1:
            self._keep(trainer.flush())
            trainer = Trainer(replace(self._state, schedule=_Metered(schedule, self._meter)))
        self._iterate(trainer, data_iterator)
        if is_first and iteration == WARM_UP - 1:
            self._keep(trainer.flush())
            self._trainer = Trainer(self._state)
        if is_first and iteration == PROFILED[1]:
            self._keep(trainer.flush())
            self._end_of_profile(iteration)
        self._tick()

    def _end_of_profile(self, iteration: int) -> None:
        schedule = self._state.schedule
        if self._replanner is not None:
            self._replanner.after(iteration, self._num_microbatches)
            self._costs, self._unit_bytes = self._replanner.costs, self._replanner.unit_bytes
        elif self._profiler is not None:
            schedule.hooks.profiler = None
            own = Measured(profile=self._profiler.profile(), link_ms=schedule.link_times())
            everybody, placement = own.gathered(), schedule.spec.placement
            self._costs = measured_costs(everybody, placement)
            self._unit_bytes = unit_bytes([each.profile for each in everybody], placement)

    def _timed(self, data_iterator: Any) -> float:
        """Run the timed iterations; returns this rank's seconds."""
        gc.collect()  # the garbage of the warm-up is not theirs
        if self._state.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(self._request.num_timed):
            self._iterate(self._trainer, data_iterator)
            before = time.perf_counter()
            self._tick()
            self._own_seconds += time.perf_counter() - before
        self._keep(self._trainer.flush())
        self._synchronize()
        return time.perf_counter() - begin

    def _iterate(self, trainer: Trainer, data_iterator: Any) -> None:
        self._state.engine.begin(
            num_microbatches=self._num_microbatches, micro_batch_size=self._state.settings.batch.micro_batch_size
        )
        self._keep(trainer.iterate(data_iterator))

    def _synchronize(self) -> None:
        if self._state.device.type == "cuda":
            torch.cuda.synchronize()

    def _keep(self, results: list[StepResult]) -> None:
        self._last = results[-1] if results else self._last

    def _result(self, seconds: float, timeline: Timeline | None, *, vocab_size: int) -> BlockResult:
        """Reduce over all ranks. They must all call this."""
        state, on_cuda = self._state, self._state.device.type == "cuda"
        assert self._last is not None
        allocated = torch.cuda.max_memory_allocated() if on_cuda else 0
        own = [state_bytes(state.chunks, state.optimizer), self._meter.most_bytes, allocated, self._own_seconds]
        most = torch.tensor([seconds, *own], dtype=torch.float64, device=state.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        parameters = torch.tensor([sum(p.numel() for chunk in state.chunks for p in chunk.parameters())], device=state.device)
        dist.all_reduce(parameters, group=parallel_state.get_model_parallel_group())
        (loss, _) = mean_losses(self._last.loss.unsqueeze(0))[0]
        measured = None
        if self._request.is_first:
            measured = Measurements(
                state_bytes=int(most[1]),
                activation_bytes=int(most[2]),
                allocated_bytes=int(most[3]) if on_cuda else None,
                costs=self._costs,
                unit_bytes=self._unit_bytes,
                timeline=timeline,
            )
        is_stock = state.schedule.spec.is_stock
        return BlockResult(
            seconds=float(most[0]),
            overhead=float(most[4] / most[0]),
            loss=loss,
            num_parameters=int(parameters[0]),
            vocab_size=vocab_size,
            device=torch.cuda.get_device_name() if on_cuda else "CPU",
            settings=state.settings,
            plan=None if is_stock else state.schedule.plan(self._num_microbatches).to_json(),
            measured=measured,
        )
