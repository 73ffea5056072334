"""A model that a stock loop trains, the schedule that runs it, and what goes with that schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.microbatches.iteration_plans import UnequalOptions, attention_share
from megatron.zerobubble.mcore.model.embeddings import copy_to_mtp_stage, tie_chunks
from megatron.zerobubble.mcore.model.layout_dropout import LayoutDropout, check_layout_dropout
from megatron.zerobubble.mcore.replanner import Replanner, make_replanner
from megatron.zerobubble.mcore.state_memory import state_bytes
from megatron.zerobubble.mcore.stock_loop.adoption import Adopted
from megatron.zerobubble.mcore.stock_loop.optimistic_steps import OptimisticSteps
from megatron.zerobubble.mcore.stock_loop.options import StockLoopOptions
from megatron.zerobubble.mcore.stock_loop.result_relay import ResultRelay
from megatron.zerobubble.mcore.stock_loop.same_options import check_same_options
from megatron.zerobubble.mcore.stock_loop.trace_files import TraceFiles
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore

__all__ = ["Running", "start", "start_forward_only"]


@dataclass(eq=False)
class Running:
    """A model, the schedule that runs it, and its re-planning."""

    chunks: list[nn.Module]
    schedule: PipelineSchedule
    replanner: Replanner | None
    relay: ResultRelay | None
    """Under V: sends the results of the last stage to the last pipeline rank."""
    steps: OptimisticSteps | None
    """With post-validation: the model's optimizer steps."""
    dropout: LayoutDropout | None
    """Draws dropout masks by layer and sample, if that was asked for."""
    trace: TraceFiles | None = None
    """Writes the trace, if one was asked for."""
    iterations: int = 0
    """Training iterations so far."""
    has_new_plan: bool = False
    """Whether it was re-planned since its status was shown."""

    def __post_init__(self) -> None:
        if self.relay is not None:
            self.schedule.hooks.on_failure = self.relay.fail

    def closers(self) -> list[Callable[[], None]]:
        """What destroys the process groups that exist so far when the model is gone, without a reference to it.

        Every rank of the world must call them, in this order.
        """
        closers = self.schedule.closers()
        if self.relay is not None:
            closers.append(self.relay.close)
        return closers if self.steps is None else [*closers, *self.steps.closers()]

    def write_trace(self, *, at_end: bool = False) -> None:
        """Write the trace if that is due. All ranks must call it between two iterations, or `at_end`."""
        if self.trace is None or not self.trace.is_due(at_end=at_end):
            return
        if self.steps is not None:
            self.steps.flush()
        self.trace.write()

    def close(self, *, validates: bool) -> None:
        """Destroy process groups; validate the last step and write the trace before, if wanted."""
        if validates:
            self.write_trace(at_end=True)
        if self.steps is not None:
            self.steps.close(validates=validates)
        self.schedule.close()
        if self.relay is not None:
            self.relay.close()

    def remove_hooks(self) -> None:
        """Leave the model as it was."""
        if self.steps is not None:
            self.steps.remove_hooks()
        if self.dropout is not None:
            self.dropout.remove()


def start(
    options: StockLoopOptions,
    first: Adopted,
    chunks: Sequence[nn.Module],
    optimizers: Iterable[Any],
    *,
    num_microbatches: int,
    usual_tokens: int,
) -> Running:
    """Make the schedule of a model of `chunks`, the first of which is `first`. All ranks of the world must call it."""
    spec = first.spec
    check_same_options(options, spec)
    if options.flags.limits_bytes:  # until memory is measured: one microbatch per rank, the least possible
        spec = dataclasses.replace(spec, memory_limit=1.0 / min(spec.num_ranks, num_microbatches))
    schedule = PipelineSchedule(
        spec,
        chunks,
        store=first.store,
        config=get_model_config(chunks[0]),
        p2p_max_ctas=options.flags.zero_bubble_p2p_max_ctas,
        unequal=_unequal(options, get_model_config(chunks[0]), usual_tokens),
    )
    relay = None
    if options.is_v:
        relay = ResultRelay(parallel_state.get_pipeline_model_parallel_group(), schedule.device)
    steps = None
    if options.flags.enable_optimizer_post_validation:
        steps = OptimisticSteps(options.flags, schedule, chunks)
    dropout = None
    if options.dropout_seed is not None:
        check_layout_dropout(get_model_config(chunks[0]))
        dropout = LayoutDropout(chunks, seed=options.dropout_seed, device=schedule.device)
    replanner = make_replanner(
        options.flags,
        schedule,
        num_microbatches=num_microbatches,
        state_bytes=functools.partial(_state_bytes, options, chunks, optimizers) if options.flags.limits_bytes else int,
        ranks_on_host=options.ranks_on_host,
    )
    trace, directory = None, options.flags.zero_bubble_trace
    if directory is not None:
        trace = TraceFiles(schedule, replanner, directory=directory, chosen=options.flags.trace_iterations)
    return Running(list(chunks), schedule, replanner, relay, steps, dropout, trace)


def start_forward_only(options: StockLoopOptions, chunks: Sequence[nn.Module], *, usual_tokens: int) -> Running:
    """Make the schedule of a model under V that DDP did not wrap and that only runs forward. All ranks of the world call it.

    Its embedding and output layer become equal here if they are tied: where DDP wraps a model, that happens before.
    """
    config = get_model_config(chunks[0])
    spec = options.spec(
        num_ranks=parallel_state.get_pipeline_model_parallel_world_size(),
        num_chunks=config.virtual_pipeline_model_parallel_size,
    )
    if len(chunks) != spec.num_chunks:
        raise ConfigError(
            f"schedule {options.schedule} takes a model of {spec.num_chunks} chunk(s), got {len(chunks)}: give the list of all "
            "of this rank's chunks"
        )
    tie_chunks(chunks)
    copy_to_mtp_stage(chunks, config)
    schedule = PipelineSchedule(
        spec,
        chunks,
        store=WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate)),  # stays empty
        config=config,
        p2p_max_ctas=options.flags.zero_bubble_p2p_max_ctas,
        unequal=_unequal(options, config, usual_tokens),
    )
    relay = ResultRelay(parallel_state.get_pipeline_model_parallel_group(), schedule.device)
    return Running(list(chunks), schedule, replanner=None, relay=relay, steps=None, dropout=None)


def _unequal(options: StockLoopOptions, config: Any, usual_tokens: int) -> UnequalOptions | None:
    """How microbatches of unequal length are planned; None: they are equal."""
    if options.microbatch_tokens is None:
        return None
    return UnequalOptions(
        tokens_of=options.microbatch_tokens,
        usual_tokens=None if config.variable_seq_lengths else usual_tokens,  # then megatron-core ignores the call's, too
        attention_share=functools.partial(attention_share, config),
        reorders=options.reorder_microbatches,
        objective=options.objective,
    )


def _state_bytes(options: StockLoopOptions, chunks: Sequence[nn.Module], optimizers: Iterable[Any]) -> int:
    """Bytes of weights, gradients and optimizer state. Raises ConfigError if the optimizer is not megatron-core's."""
    made = list(optimizers)
    if not made:
        raise ConfigError(
            f"schedule {options.schedule} has a memory limit in bytes, and no optimizer of megatron-core was made since "
            "megatron.zerobubble.install: make it by get_megatron_optimizer, or give the limit as a number (1 is 1F1B's)"
        )
    return state_bytes(chunks, SimpleNamespace(chained_optimizers=made))
