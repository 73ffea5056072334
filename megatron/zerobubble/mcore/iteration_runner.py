"""One iteration of one rank: a program's ops on the executor, with what records, profiles or validates beside them.

    Program + Iteration -> ChunkWork -> Executor -> losses

`IterationHooks` are the optional parts: None everywhere costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.zerobubble.mcore.ddp.wrap import start_first_gathers
from megatron.zerobubble.mcore.model.dispatchers import token_dispatchers
from megatron.zerobubble.mcore.model.expert_exchanges import ExpertExchanges
from megatron.zerobubble.mcore.model.rng import draws
from megatron.zerobubble.mcore.model.shared_experts import side_streams
from megatron.zerobubble.mcore.model.timed_dispatchers import timed_dispatchers
from megatron.zerobubble.mcore.model.wgrad_split import driven_modules, split_weights
from megatron.zerobubble.mcore.post_validation.rewind import Habits, Replayed, Rewind
from megatron.zerobubble.mcore.post_validation.token_count import TokenCount
from megatron.zerobubble.mcore.sliced_work import SlicedWork
from megatron.zerobubble.mcore.slices.sliced_chunks import SlicedChunks
from megatron.zerobubble.mcore.stage_work import ChunkWork, Iteration
from megatron.zerobubble.plan.communication import Program
from megatron.zerobubble.plan.ir import OpKind, Plan
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.tail import Tail, tail_of
from megatron.zerobubble.plan.timeline import Activity
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.profiling.recordings import Recordings
from megatron.zerobubble.runtime.executor import BatchedExecutor, Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from megatron.zerobubble.runtime.recording import Recorder, fan_out
from megatron.zerobubble.runtime.watch import Watch
from megatron.zerobubble.wgrad.deferring import WgradKey
from megatron.zerobubble.wgrad.store import WeightGradStore


@dataclass(eq=False)
class IterationHooks:
    """What else happens in a rank's iterations. Set the fields between two iterations; None: nothing."""

    profiler: Profiler | MemoryMeter | None = None
    """Measures the times and memory of the passes of every training iteration, or their memory alone."""
    before_gradients: Callable[[], bool] | None = None
    """Called in every training iteration after its first forward passes and before anything touches gradients. True: the last
    optimizer step was wrong and has been redone, so those forward passes run again, with the same data and random state."""
    token_count: TokenCount | None = None
    """Sends the number of tokens from the last stage's last F to all ranks, in training iterations."""
    on_results: Callable[[], None] | None = None
    """Called on the rank with the last stage behind its last F: the results of the loss function are complete."""
    on_failure: Callable[[Exception], None] | None = None
    """Called on the rank with the last stage before it raises the error of a loss function, in calls with forward passes only."""
    watch: Watch | None = None
    """Records what this rank does, for a watchdog that looks after ranks that hang."""


class IterationRunner:
    """Runs programs over one rank's chunks.

    Args:
        spec: the schedule.
        chunks: this rank's model chunks, wrapped by DDP, in the order of their stages.
        store: the store that the chunks' linears were split into.
        config: the chunks' TransformerConfig.
        links: to the other pipeline ranks.
        recorder: records what happens around the passes.
        recordings: which training iterations are recorded.
        device: where tensors live.
        rank: pipeline rank.
        positions: where microbatches are cut, what the loop's position ids are (`SliceOptions`).
        overlap_moe: whether the all-to-alls of experts run beside the other pass of a pair, or a deferred wgrad GEMM.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        chunks: Sequence[nn.Module],
        *,
        store: WeightGradStore,
        config: Any,
        links: ProcessGroupLinks,
        recorder: OpRecorder,
        recordings: Recordings,
        device: torch.device,
        rank: int,
        positions: str | None = None,
        overlap_moe: bool = False,
    ) -> None:
        self._spec = spec
        self._chunks = chunks
        dispatchers = [token_dispatchers(chunk) for chunk in chunks]
        self._dispatchers = dispatchers if any(dispatchers) else []
        self._deferred = [[*split_weights(chunk), *driven_modules(chunk)] for chunk in chunks]
        self._side_streams = [side_streams(chunk) for chunk in chunks]
        # Each switch takes the host a copy of all generators. On a CPU that is little beside the passes.
        self._has_rng_streams = device.type == "cpu" or any(draws(chunk) for chunk in chunks)
        self.sliced = SlicedChunks(chunks, positions) if spec.num_slices > 1 else None
        """The chunks, made to run slice by slice; None: microbatches are not cut."""
        self._store = store
        self._config = config
        self._links = links
        self._executor_of = BatchedExecutor if links.is_batched else Executor
        self._recorder = recorder
        self._recordings = recordings
        self._device = device
        self._rank = rank
        self._habits = Habits()
        self._exchanges = self._expert_exchanges() if overlap_moe else None

    def _expert_exchanges(self) -> ExpertExchanges | None:
        """Those of this rank; None if its stages have no experts."""
        dispatchers = [each for chunk in self._dispatchers for each in chunk]
        if not dispatchers:
            return None
        config = self._config
        # the head's GEMM takes longer than an all-to-all
        largest = config.hidden_size * config.ffn_hidden_size * (2 if config.gated_linear_unit else 1)
        return ExpertExchanges(dispatchers, self._device, partial(self._store.fill, largest))

    def restore_model(self) -> None:
        """Leave the chunks' layers and dispatchers as they were."""
        if self.sliced is not None:
            self.sliced.remove()
        if self._exchanges is not None:
            self._exchanges.remove()

    def run(self, program: Program, iteration: Iteration, hooks: IterationHooks) -> ChunkWork:
        """All passes of one call of the schedule; the work holds its losses. Every rank of the pipeline must call it."""
        is_training = not iteration.forward_only
        if hooks.profiler is not None:
            program = program.one_by_one()
        if hooks.before_gradients is not None and is_training:
            iterators = [None if each is None else Replayed(each, self._habits) for each in iteration.data_iterators]
            iteration = replace(iteration, data_iterators=iterators)
        # For a profiler the plan decides what each op takes and holds, those of a pair too; and a GEMM on another stream would
        # need waits of its own.
        self._store.keeps_order = hooks.profiler is not None or any(self._side_streams)
        work = self._work(program, iteration, hooks)
        recorder = self._recorder_of(program.plan, hooks) if is_training else None
        executor = self._executor(program, work, recorder, hooks)
        if is_training:
            start_first_gathers(self._chunks)
        if isinstance(hooks.profiler, Profiler):
            hooks.profiler.lengths = iteration.pass_lengths
        self._store.due_at_once = _due_at_once(program, self._rank)
        if self._exchanges is not None:
            self._exchanges.recorder = recorder
        try:
            with (
                hooks.profiler if hooks.profiler is not None and is_training else nullcontext(),
                timed_dispatchers(self._dispatchers, self._config, recorder),
            ):
                if hooks.before_gradients is not None and is_training:
                    work, executor = self._validated(program, iteration, work, executor, recorder, hooks)
                executor.run()
        except BaseException:
            self._store.clear()
            if self.sliced is not None:
                self.sliced.current.clear()
            raise
        work.finish()
        if self.sliced is not None and isinstance(hooks.profiler, Profiler):
            stages, key_bytes = self._spec.placement.rank_to_stages[self._rank], self.sliced.current.key_bytes
            hooks.profiler.key_bytes = {stages[chunk]: count for chunk, count in key_bytes.items()}
        if work.failure is not None:
            if hooks.on_failure is not None:
                hooks.on_failure(work.failure)
            raise work.failure
        return work

    def _validated(
        self,
        program: Program,
        iteration: Iteration,
        work: ChunkWork,
        executor: Executor,
        recorder: Recorder | None,
        hooks: IterationHooks,
    ) -> tuple[ChunkWork, Executor]:
        """Run the forward passes before the fence and validate the last step; start over if they ran with wrong weights."""
        assert hooks.before_gradients is not None
        rewind = Rewind(iteration.data_iterators, self._chunks)
        executor.begin(program.fence[self._rank])
        rewind.before_step()
        _report(hooks, "asks the other ranks whether its last step was right")
        with self._recorder.span(Activity.VALIDATE):
            is_wrong = hooks.before_gradients()
        if not is_wrong:
            rewind.release()
            return work, executor
        _report(hooks, "gives up its first forwards")
        executor.abandon(program.unread(self._rank))
        work.abandon()
        rewind.rewind()
        if recorder is not None:
            recorder.rewind()
        work = self._work(program, iteration, hooks)
        return work, self._executor(program, work, recorder, hooks)

    def _work(self, program: Program, iteration: Iteration, hooks: IterationHooks) -> ChunkWork:
        token_count = None if iteration.forward_only else hooks.token_count
        kind = ChunkWork if self.sliced is None else partial(SlicedWork, slices=self.sliced.current)
        return kind(
            self._chunks,
            self._spec.placement,
            self._store,
            self._config,
            iteration,
            self._device,
            tail=Tail() if self._store.keeps_order else self.tail(program.plan),
            on_counted=None if token_count is None else token_count.send,
            on_results=hooks.on_results,
            dispatchers=self._dispatchers,
            deferred=self._deferred,
            side_streams=self._side_streams,
            has_rng_streams=self._has_rng_streams,
            exchanges=self._exchanges,
        )

    def tail(self, plan: Plan) -> Tail:
        """How the last Ws of this rank run in an iteration without a profiler."""
        beside = self._spec.overlaps_reductions and not any(self._side_streams)
        return tail_of(plan.ops[self._rank]) if beside else Tail()

    def _executor(self, program: Program, work: ChunkWork, recorder: Recorder | None, hooks: IterationHooks) -> Executor:
        recorders = fan_out([each for each in (recorder, hooks.watch) if each is not None])
        return self._executor_of(program, self._rank, self._links, work, recorders)

    def _recorder_of(self, plan: Plan, hooks: IterationHooks) -> Recorder | None:
        """What records this training iteration, for any kind of work."""
        recording = self._recordings.begin(plan, is_disturbed=hooks.profiler is not None)
        return fan_out([each for each in (hooks.profiler, recording) if each is not None])


def _report(hooks: IterationHooks, what: str) -> None:
    if hooks.watch is not None:
        hooks.watch.report(what, is_shared=True)


def _due_at_once(program: Program, rank: int) -> frozenset[WgradKey]:
    """What of a rank has its W right after its B."""
    chunk_of = program.plan.placement.chunk_of
    return frozenset(
        WgradKey(chunk_of(op.stage), op.microbatch, op.slice)
        for op, after in itertools.pairwise(program.plan.ops[rank])
        if op.kind is OpKind.B and after == op._replace(kind=OpKind.W)
    )
