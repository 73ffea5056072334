"""The door: a schedule with the same call signature as what megatron-core's `get_forward_backward_func()` returns.

    choice -> Plan (planned and validated once per number of microbatches) -> Program (transfers placed) -> Executor

With the choice "stock" the function *is* megatron-core's own, untouched: the baseline.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.ddp.record_buckets import record_buckets
from megatron.zerobubble.mcore.ddp.wrap import start_first_gathers
from megatron.zerobubble.mcore.post_validation.rewind import Replayed, Rewind
from megatron.zerobubble.mcore.stage_work import ChunkWork, Iteration
from megatron.zerobubble.plan.communication import Program, place_communication, speculative_forwards
from megatron.zerobubble.plan.deadlock import finishes
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan, schedule_info
from megatron.zerobubble.plan.search.search import SearchOptions
from megatron.zerobubble.plan.timeline import Activity, Timeline
from megatron.zerobubble.plan.transforms import forward_only as only_forward
from megatron.zerobubble.plan.transforms import group_weight_gradients
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.profiling.memory import MemoryMeter
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.profiling.recordings import Recordings
from megatron.zerobubble.runtime.clock import clock_offset_ms
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from megatron.zerobubble.runtime.recording import Recorder, together
from megatron.zerobubble.runtime.watch import Watch
from megatron.zerobubble.wgrad.store import WeightGradStore

STOCK = "stock"
"""Name of the choice that leaves scheduling to megatron-core."""


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """Which schedule, on how many ranks."""

    name: str
    """`stock`, or a name of `megatron.zerobubble.plan.registry`."""
    num_ranks: int
    """Pipeline size, p."""
    num_chunks: int = 1
    """Stages a rank, v."""
    max_pending_backward: int | None = None
    """For `zb`: most microbatches between F and W on a rank."""
    memory_limit: float | None = None
    """Most activation memory on any rank, 1.0 is 1F1B's rank 0; None: the schedule's own."""
    given: Plan | None = None
    """A plan of this placement, to be run where the number of microbatches is its own."""
    shard_gradients: int | None = None
    """Keep gradients sharded while they are accumulated; Ws of so many microbatches run together. None: do not."""

    @property
    def is_stock(self) -> bool:
        """Whether megatron-core schedules."""
        return self.name == STOCK

    @property
    def placement(self) -> Placement:
        """Stage -> rank."""
        kind = "loop" if self.is_stock else schedule_info(self.name).placement
        if kind == "V":
            return Placement.v(self.num_ranks)
        return Placement.loop(self.num_ranks, self.num_chunks)

    @property
    def family(self) -> tuple[str, int | None]:
        """Which schedule to search, with its `max_pending_backward`, for this one's placement and memory."""
        drawn = {"zb-h1": self.num_ranks, "zb-h2": 2 * self.num_ranks}
        return ("zb", drawn[self.name]) if self.name in drawn else (self.name, self.max_pending_backward)

    def plan(self, num_microbatches: int) -> Plan:
        """The validated plan for this many microbatches, before anything was measured. Not for `stock`."""
        if self.given is not None and self.given.num_microbatches == num_microbatches:
            return self.given
        return build_plan(
            self.name,
            num_ranks=self.num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=self.num_chunks,
            max_pending_backward=self.max_pending_backward,
            options=None if self.memory_limit is None else SearchOptions(memory_limit=self.memory_limit, budget=0.0),
        )

    def as_run(self, plan: Plan) -> Plan:
        """What training executes of a plan: where gradients are sharded, with its Ws in groups."""
        if self.shard_gradients is None:
            return plan
        grouped = group_weight_gradients(plan, self.shard_gradients)
        validate(grouped)
        return grouped


def program_of(plan: Plan, device: torch.device, *, fence: Sequence[int] = ()) -> Program:
    """The plan with its transfers. Raises ConfigError where kernels in one hardware queue can wait for each other (ADR 3)."""
    program = place_communication(plan, fence=fence)
    single_queue = device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if single_queue and not finishes(program, single_queue=True):
        raise ConfigError(
            f"schedule {plan.schedule!r} with {plan.num_ranks} ranks and {plan.num_microbatches} microbatches can deadlock with "
            "CUDA_DEVICE_MAX_CONNECTIONS=1: set it to 8, or choose another schedule or number of microbatches"
        )
    return program


class PipelineSchedule:
    """One rank's schedule for the whole run. Every rank of the world must construct it at the same point.

    Args:
        choice: which schedule.
        chunks: this rank's model chunks, wrapped by DDP.
        store: the store the chunks' linears were split into; None for stock.
        config: the chunks' TransformerConfig.
        timeout: how long a transfer between two ranks may take; None for the backend's default.
    """

    def __init__(
        self,
        choice: ScheduleChoice,
        chunks: Sequence[nn.Module],
        *,
        store: WeightGradStore | None,
        config: Any,
        timeout: timedelta | None = None,
    ) -> None:
        self.choice = choice
        self._chunks = list(chunks)
        self._store = store
        self._config = config
        self._plan_for: Callable[[int], Plan] = choice.plan
        self._plans: dict[int, Plan] = {}
        self._programs: dict[tuple[int, bool], Program] = {}
        self._rank = parallel_state.get_pipeline_model_parallel_rank()
        self.device = torch.device(torch.cuda.current_device())
        """Where tensors live."""
        self.recorder = OpRecorder(self.device)
        """Holds the last recorded iteration; owners of what happens around the passes record spans with it."""
        self.recordings = Recordings(self.recorder, self._clock_offset_ms)
        """Which training iterations are recorded."""
        if not choice.is_stock:
            record_buckets(self._chunks, choice.placement.rank_to_stages[self._rank], self.recorder)
        self.profiler: Profiler | MemoryMeter | None = None
        """Measures the passes of every training iteration, or their memory alone, if given."""
        self._tensor: tuple[tuple[int, ...], torch.dtype] | None = None
        self.observe: Callable[[ChunkWork, Any], None] | None = None
        """Called after every op with the work in progress and the op, if given. For tests and tools."""
        self.before_gradients: Callable[[], bool] | None = None
        """Called in every training iteration after its first forwards and before anything touches gradients, if given. True: the
        weights were not what they should have been, and the forwards run again, with the same data and the same random state."""
        self.watch: Watch | None = None
        """Told what this rank does, if given, for who looks after ranks that are stuck."""
        self._links: ProcessGroupLinks | None = None
        if not choice.is_stock:
            if store is None:
                raise ConfigError(f"schedule {choice.name!r} needs the weight-gradient store its chunks were split into")
            pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
            self._links = ProcessGroupLinks(
                choice.placement, pipeline=pipeline, rank=self._rank, device=self.device, timeout=timeout
            )

    @property
    def forward_backward_func(self) -> Callable[..., list[Any]]:
        """What a training loop calls; the keywords are megatron-core's."""
        if self.choice.is_stock:
            function: Callable[..., list[Any]] = schedules.get_forward_backward_func()
            return function
        return self._forward_backward

    def plan(self, num_microbatches: int) -> Plan:
        """The plan that training runs for this many microbatches. Planned on first use."""
        if num_microbatches not in self._plans:
            self._plans[num_microbatches] = self.choice.as_run(self._plan_for(num_microbatches))
        return self._plans[num_microbatches]

    def replan(self, plan_for: Callable[[int], Plan]) -> None:
        """From the next iteration on, run what `plan_for` says: a plan of the choice's placement for a number of microbatches.

        Every rank of the world must call it, at the same point between two iterations, and get the same plans. `plan_for` is
        asked once for each number of microbatches, by all ranks at the same point.
        """
        self._plan_for = plan_for
        self._plans.clear()
        self._programs.clear()

    def link_times(self) -> dict[tuple[int, int], float]:
        """Milliseconds that a stage's output travels on each link from this rank; nothing before the first iteration.

        Every rank of the world must call it between two iterations.
        """
        if self._links is None or self._tensor is None:
            return {}
        return self._links.times(*self._tensor)

    def program(self, num_microbatches: int, *, forward_only: bool = False) -> Program:
        """The plan that runs for this many microbatches, with its transfers. Placed on first use."""
        key = num_microbatches, forward_only
        if key not in self._programs:
            if forward_only and num_microbatches not in self._plans:
                plan = self.choice.plan(num_microbatches)  # evaluation only: nothing to search for
            else:
                plan = self.plan(num_microbatches)
            if forward_only:
                plan = only_forward(plan)
                validate(plan, forward_only=True)
            fence = () if forward_only or self.before_gradients is None else speculative_forwards(plan)
            self._programs[key] = program_of(plan, self.device, fence=fence)
        return self._programs[key]

    def timelines(self) -> list[Timeline]:
        """The chosen iterations of this pipeline that ran, or else the last recorded one, on the clock of its first rank.

        Every rank must call it, between two iterations. Empty where nothing was recorded: under stock schedules, and before a
        second iteration.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        return self.recordings.gather(group, num_ranks=self.choice.num_ranks)

    def close(self) -> None:
        """Give back the process groups. Every rank of the world must call it."""
        if self._links is not None:
            self._links.close()

    def _clock_offset_ms(self) -> float:
        assert self._links is not None
        return clock_offset_ms(self._links, rank=self._rank, num_ranks=self.choice.num_ranks, device=self.device)

    def _forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        self._refuse(
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn, p2p_communicator=p2p_communicator, pg_collection=pg_collection
        )
        self._check_model(model)
        timers = self._config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=self._config.barrier_with_L1_time)
        iteration = Iteration(
            forward_step_func=forward_step_func,
            data_iterators=self._iterators(data_iterator, replays=self.before_gradients is not None and not forward_only),
            num_microbatches=num_microbatches,
            tensor_shape=self._tensor_shape(seq_length, micro_batch_size, decoder_seq_length),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
        )
        with nullcontext() if self.watch is None else self.watch.passes(forward_only=forward_only):
            work = self._run(iteration)
            if self._config.finalize_model_grads_func is not None and not forward_only:
                num_tokens = work.num_tokens if self._config.calculate_per_token_loss else None
                self._tell("makes its gradients final with other ranks")
                with self.recorder.span(Activity.GRADIENTS):
                    self._config.finalize_model_grads_func(self._chunks, num_tokens, force_all_reduce=force_all_reduce)
        if timers is not None:
            timers("forward-backward").stop()
        return work.losses

    def _run(self, iteration: Iteration) -> ChunkWork:
        assert self._store is not None
        assert self._links is not None
        program = self.program(iteration.num_microbatches, forward_only=iteration.forward_only)
        self._tensor = iteration.tensor_shape, self._config.pipeline_dtype
        work = self._work(iteration)
        recorder = None if iteration.forward_only else self._recorder(program.plan)
        executor = Executor(program, self._rank, self._links, work, self._observed(work, recorder))
        if not iteration.forward_only:
            start_first_gathers(self._chunks)
        profiles = self.profiler if self.profiler is not None and not iteration.forward_only else nullcontext()
        self._store.keeps_order = self.profiler is not None  # what each op takes and holds is the plan's business
        self._store.due_at_once = _due_at_once(program, self._rank)
        try:
            with profiles:
                if self.before_gradients is not None and not iteration.forward_only:
                    work, executor = self._begin(program, iteration, work, executor, recorder)
                executor.run()
        except BaseException:
            self._store.clear()
            raise
        work.finish()
        return work

    def _work(self, iteration: Iteration) -> ChunkWork:
        assert self._store is not None
        return ChunkWork(
            self._chunks,
            self.choice.placement,
            self._store,
            self._config,
            iteration,
            self.device,
            wgrad_group_size=self.choice.shard_gradients or 1,
        )

    def _recorder(self, plan: Plan) -> Recorder | None:
        """Whoever wants to hear of this training iteration, whatever its work is."""
        recording = self.recordings.begin(plan, is_disturbed=self.profiler is not None or self.observe is not None)
        return together([each for each in (self.profiler, recording) if each is not None])

    def _observed(self, work: ChunkWork, recorder: Recorder | None) -> Recorder | None:
        """With whoever wants to see the work, too."""
        observer = None if self.observe is None else _Observer(work, self.observe)
        return together([each for each in (observer, recorder, self.watch) if each is not None])

    def _tell(self, what: str) -> None:
        if self.watch is not None:
            self.watch.tell(what)

    def _begin(
        self, program: Program, iteration: Iteration, work: ChunkWork, executor: Executor, recorder: Recorder | None
    ) -> tuple[ChunkWork, Executor]:
        """The forwards before the fence, again if they ran with wrong weights; what the rest of the iteration goes on with."""
        assert self.before_gradients is not None
        assert self._links is not None
        assert self._store is not None
        rewind = Rewind(iteration.data_iterators, self._chunks)
        executor.begin(program.fence[self._rank])
        self._tell("asks the other ranks whether its last step was right")
        with self.recorder.span(Activity.VALIDATE):
            is_wrong = self.before_gradients()
        if not is_wrong:
            rewind.release()
            return work, executor
        self._tell("gives up its first forwards")
        executor.abandon(program.unread(self._rank))
        work.abandon()
        rewind.rewind()
        if recorder is not None:
            recorder.rewind()
        work = self._work(iteration)
        return work, Executor(program, self._rank, self._links, work, self._observed(work, recorder))

    def _refuse(self, **unsupported: Any) -> None:
        for name, value in unsupported.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is not supported by schedule {self.choice.name!r}; leave it out or use --zero-bubble-schedule stock"
                )

    def _check_model(self, model: Any) -> None:
        given = model if isinstance(model, list) else [model]
        if len(given) != len(self._chunks) or any(a is not b for a, b in zip(given, self._chunks, strict=True)):
            raise ConfigError("the model given to the schedule is not the list of chunks that the schedule was built for")

    def _iterators(self, data_iterator: Any, *, replays: bool) -> Sequence[Any]:
        iterators = self._checked_iterators(data_iterator)
        if not replays:
            return iterators
        return [None if iterator is None else Replayed(iterator) for iterator in iterators]

    def _checked_iterators(self, data_iterator: Any) -> Sequence[Any]:
        if isinstance(data_iterator, list):
            if len(data_iterator) != len(self._chunks):
                raise ConfigError(f"{len(data_iterator)} data iterators were given for {len(self._chunks)} model chunks")
            return data_iterator
        if len(self._chunks) > 1:
            raise ConfigError(
                f"schedule {self.choice.name!r} has {len(self._chunks)} model chunks a rank: give data_iterator as a list, one "
                "iterator for each chunk over the same samples (two chunks drawing from one iterator would see different data)"
            )
        return [data_iterator]

    def _tensor_shape(self, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None) -> tuple[int, ...]:
        if getattr(self._config, "variable_seq_lengths", False):
            raise ConfigError(f"variable_seq_lengths is not supported by schedule {self.choice.name!r}; pad to --seq-length")
        (shape,) = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=self._config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
        )
        return tuple(shape)


def _due_at_once(program: Program, rank: int) -> frozenset[tuple[int, int]]:
    """The (chunk, microbatch) pairs of a rank whose W comes right after their B."""
    ops = [step.op for step in program.steps[rank]]
    chunk_of = program.plan.placement.chunk_of
    return frozenset(
        (chunk_of(op.stage), op.microbatch)
        for op, after in itertools.pairwise(ops)
        if (op.kind, after.kind) == (OpKind.B, OpKind.W) and (op.stage, op.microbatch) == (after.stage, after.microbatch)
    )


class _Observer(Recorder):
    """A recorder that shows the work in progress after every op."""

    def __init__(self, work: ChunkWork, show: Callable[[ChunkWork, Any], None]) -> None:
        self._work, self._show = work, show

    def end(self, op: Any) -> None:
        """Show."""
        self._show(self._work, op)
