"""A model that a stock loop trains: its engine, and what a loop needs that is written for megatron-core's own schedules."""

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
from megatron.zerobubble.mcore.agreement import refusing_together
from megatron.zerobubble.mcore.engine import Engine
from megatron.zerobubble.mcore.model.embeddings import copy_to_mtp_stage, tie_chunks
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.mcore.state_memory import state_bytes
from megatron.zerobubble.mcore.stock_loop.adoption import Adopted
from megatron.zerobubble.mcore.stock_loop.megatron_lm import cut_megatron_lm_batch, megatron_lm_args
from megatron.zerobubble.mcore.stock_loop.mtp_sums import AddedMtpSums, add_mtp_sums
from megatron.zerobubble.mcore.stock_loop.optimistic_steps import OptimisticSteps
from megatron.zerobubble.mcore.stock_loop.result_relay import ResultRelay
from megatron.zerobubble.mcore.stock_loop.same_options import check_same_options
from megatron.zerobubble.mcore.stock_loop.status import show_line
from megatron.zerobubble.mcore.stock_loop.trace_files import TraceFiles
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore

__all__ = ["Running", "start", "start_forward_only"]


@dataclass(eq=False)
class Running:
    """A model and its engine."""

    engine: Engine
    relay: ResultRelay | None = None
    """Under V: sends the results of the last stage to the last pipeline rank."""
    steps: OptimisticSteps | None = None
    """With post-validation: the model's optimizer steps."""
    trace: TraceFiles | None = None
    """Says when the trace is written, if one was asked for."""
    has_new_plan: bool = False
    """Whether it was re-planned since its status was shown."""

    def __post_init__(self) -> None:
        if self.relay is not None:
            self.engine.schedule.hooks.on_failure = self.relay.fail

    @property
    def chunks(self) -> list[nn.Module]:
        """This rank's model chunks, wrapped by DDP."""
        return self.engine.chunks

    def relayed(self, call: Callable[[], list[Any]]) -> list[Any]:
        """What one call of the schedule returns; under V what it has of losses on the first rank, also on the last one.

        Every rank must call it.
        """
        relay = self.relay
        if relay is None:
            return call()

        def on_results() -> None:
            mtp.note()
            relay.mark()

        with AddedMtpSums() as mtp:
            self.engine.schedule.hooks.on_results = on_results
            results = call()
        results, added = relay([results, mtp.added])
        if relay.is_last:
            add_mtp_sums(added)
        return results

    def closers(self) -> list[Callable[[], None]]:
        """What destroys the process groups that exist so far when the model is gone, without a reference to it.

        Every rank of the world must call them, in this order.
        """
        closers = self.engine.schedule.closers()
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
        """Destroy process groups; validate the last step and write the files before, if wanted."""
        if validates:
            self.write_trace(at_end=True)
            if self.engine.iterations > 0:
                self.engine.write_plan()
        if self.steps is not None:
            self.steps.close(validates=validates)
        self.engine.close()
        if self.relay is not None:
            self.relay.close()

    def remove_hooks(self) -> None:
        """Leave the model as it was."""
        if self.steps is not None:
            self.steps.remove_hooks()
        if self.engine.dropout is not None:
            self.engine.dropout.remove()
        self.engine.schedule.restore_model()


def start(
    options: RunOptions,
    first: Adopted,
    chunks: Sequence[nn.Module],
    optimizers: Iterable[Any],
    *,
    num_microbatches: int,
    usual_tokens: int,
) -> Running:
    """Make what runs a model of `chunks`, the first of which is `first`. All ranks of the world must call it."""
    spec, config = first.spec, get_model_config(chunks[0])
    check_same_options(options, spec)
    if options.flags.limits_bytes:  # until memory is measured: one microbatch per rank, the least possible
        spec = dataclasses.replace(spec, memory_limit=1.0 / min(spec.num_ranks, num_microbatches))
    engine = Engine(
        _with_cut(options),
        spec,
        chunks,
        store=first.store,
        config=config,
        num_microbatches=num_microbatches,
        usual_tokens=_usual_tokens(config, usual_tokens),
        state_bytes=functools.partial(_state_bytes, options, chunks, optimizers),
        show=show_line,
    )
    relay = None
    if options.is_v:
        relay = ResultRelay(parallel_state.get_pipeline_model_parallel_group(), engine.schedule.device)
    steps = None
    if options.flags.enable_optimizer_post_validation:
        steps = OptimisticSteps(options.flags, engine.schedule, chunks)
    trace = None if options.flags.zero_bubble_trace is None else TraceFiles(engine, options.flags.zero_bubble_trace)
    return Running(engine, relay, steps, trace)


def start_forward_only(options: RunOptions, chunks: Sequence[nn.Module], *, usual_tokens: int) -> Running:
    """Make what runs a model under V that DDP did not wrap and that only runs forward. All ranks of the world call it.

    Its embedding and output layer become equal here if they are tied: where DDP wraps a model, that happens before.
    """
    config = get_model_config(chunks[0])
    with refusing_together():
        spec = options.spec(
            num_ranks=parallel_state.get_pipeline_model_parallel_world_size(),
            num_chunks=config.virtual_pipeline_model_parallel_size,
        )
        if len(chunks) != spec.num_chunks:
            raise ConfigError(
                f"schedule {options.schedule} takes a model of {spec.num_chunks} chunk(s), got {len(chunks)}: give the list of "
                "all of this rank's chunks"
            )
    tie_chunks(chunks)
    copy_to_mtp_stage(chunks, config)
    engine = Engine(
        _with_cut(options),
        spec,
        chunks,
        store=WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate)),  # stays empty
        config=config,
        num_microbatches=1,
        usual_tokens=_usual_tokens(config, usual_tokens),
        trains=False,
    )
    return Running(engine, ResultRelay(parallel_state.get_pipeline_model_parallel_group(), engine.schedule.device))


def _with_cut(options: RunOptions) -> RunOptions:
    """The options, with what cuts the batches of Megatron-LM's loop where that runs."""
    if options.flags.num_slices == 1 or options.cut is not None or megatron_lm_args() is None:
        return options
    return dataclasses.replace(options, cut=cut_megatron_lm_batch)


def _usual_tokens(config: Any, given: int) -> int | None:
    """The sequence length of a schedule's call, which megatron-core ignores with variable lengths."""
    return None if config.variable_seq_lengths else given


def _state_bytes(options: RunOptions, chunks: Sequence[nn.Module], optimizers: Iterable[Any]) -> int:
    """Bytes of weights, gradients and optimizer state.

    Raises:
        ConfigError: a limit in bytes, and the optimizer is not megatron-core's.
    """
    made = list(optimizers)
    if not made and options.flags.limits_bytes:
        raise ConfigError(
            f"schedule {options.schedule} has a memory limit in bytes, and no optimizer of megatron-core was made since "
            "megatron.zerobubble.install: make it by get_megatron_optimizer, or give the limit as a number (1 is 1F1B's)"
        )
    return state_bytes(chunks, SimpleNamespace(chained_optimizers=made))
