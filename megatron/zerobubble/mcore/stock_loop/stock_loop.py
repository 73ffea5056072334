"""A schedule of ours in a stock loop, one that is written for megatron-core and builds its own model, DDP and optimizer.

`StockLoop` does its work at the four points that every stock loop passes, where `install` calls it:

1. a TransformerConfig is made: the layers of each stage under V, and Transformer Engine's `delay_wgrad_compute`;
2. a model chunk is built: whether it holds the first or the last stage;
3. DDP wraps the chunk: the B/W split, tied embeddings, and DDP's part of the contract (`adoption`, `mcore.model.wgrad_split`);
4. the forward-backward function is called: `PipelineSchedule` (`running`), and under V the gradients that `finalize_model_grads`
   leaves out, questions for the running stage (`stage_questions`), and the losses on the rank that logs them (`result_relay`).

The loop must build as many chunks per rank as the schedule has, as for megatron-core's own interleaved schedule (virtual
pipeline size, `vp_stage`, one data iterator per chunk), and wrap each with megatron-core's DistributedDataParallel.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.supervision import Supervision
from megatron.zerobubble.mcore.agreement import refusing_together
from megatron.zerobubble.mcore.config_checks import OVERLAP_MOE, turn_off
from megatron.zerobubble.mcore.engine import Engine
from megatron.zerobubble.mcore.model.embeddings import FinalizeGradients
from megatron.zerobubble.mcore.model.graph_replays import LayerGraphs
from megatron.zerobubble.mcore.model.hybrid_layers import place_stack
from megatron.zerobubble.mcore.model.named_weights import remember_from
from megatron.zerobubble.mcore.model.transformer_engine import defer_to_w
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.mcore.stock_loop.adoption import AdoptedChunks
from megatron.zerobubble.mcore.stock_loop.graph_options import check_graph_options
from megatron.zerobubble.mcore.stock_loop.layers import DividedLayers
from megatron.zerobubble.mcore.stock_loop.lifetime import RunningModels
from megatron.zerobubble.mcore.stock_loop.megatron_lm import megatron_lm_args, sliced_batches
from megatron.zerobubble.mcore.stock_loop.optimistic_steps import StepOutcome, trains
from megatron.zerobubble.mcore.stock_loop.running import Running, start, start_forward_only
from megatron.zerobubble.mcore.stock_loop.stage_questions import StageQuestions
from megatron.zerobubble.mcore.stock_loop.status import Status, show_line
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern
from megatron.zerobubble.plan.timeline import Activity
from megatron.zerobubble.profiling.report import report

__all__ = ["StockLoop"]

_log = logging.getLogger(__name__)


class StockLoop:
    """One installation's chunks, stores and schedules.

    Args:
        options: the schedule, and how it is planned.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.undo: list[tuple[Any, str, Any]] = []
        """(owner, name, original value) of everything that `install` replaced, in that order."""
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        """With a memory limit in bytes: megatron-core's optimizers that were made since, without chains of them."""
        self.questions = StageQuestions(self.ends)
        """Which chunk runs, under V."""
        self._layers = DividedLayers(
            lambda ranks, chunks, layout: options.spec(num_ranks=ranks, num_chunks=chunks, layout=layout)
        )
        self._configs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """By identity, those that still exist: a loop may make one per microbatch, and they cannot be hashed."""
        self.turned_off: set[str] = set()
        """Options of configs that were turned off."""
        self.adopted = AdoptedChunks(options, self.ends)
        """The chunks that DDP wrapped."""
        self._models = RunningModels()
        self._finalizing: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """By identity, configs whose `finalize_model_grads_func` is a `FinalizeGradients` around the loop's."""
        self._status: Status | None = None
        self._has_run = False
        self.supervision = Supervision(options.flags.zero_bubble_watchdog_seconds)
        """Watchdog and failure report, around the loop's calls."""

    @property
    def status(self) -> Status | None:
        """Of the model that was started or re-planned last; None before a model trains, and without its process groups."""
        return self._status if self.has_groups else None

    @property
    def has_groups(self) -> bool:
        """Whether a model was started on process groups that exist."""
        return self._models.has_groups

    # -- 1. a TransformerConfig is made -----------------------------------------------------------------------------------

    def configure(self, config: Any) -> dict[str, Any]:
        """Set the layers of each stage under V, before megatron-core checks a new `config`.

        Returns:
            Options that are off during the check, for `configured`.

        Raises:
            ConfigError: the schedule, or how the layers are to be divided, does not go with the pipeline.
        """
        num_ranks = config.pipeline_model_parallel_size
        if num_ranks > 1:
            config.delay_wgrad_compute = False  # set by `configured`, if this config is made from another one
            turn_off(config, self.turned_off)
        if not self.options.is_v or num_ranks < 2 or getattr(config, "is_hybrid_model", False):
            return {}  # the pattern of a HybridModel has the layers of each stage
        return self._layers.divide(config)

    def configured(self, config: Any, options: Mapping[str, Any]) -> None:
        """Let Transformer Engine leave weight gradients to W. After megatron-core's checks, which demand MoE overlap for this.

        Args:
            config: that has been checked.
            options: the result of `configure`.
        """
        for name, value in options.items():
            setattr(config, name, value)
        if self.options.seeds.weights is not None:
            remember_from(config)
        if config.pipeline_model_parallel_size > 1:
            check_graph_options(config, self.options)
            defer_to_w(config)
            self._configs[id(config)] = config

    # -- 2. a chunk is built ----------------------------------------------------------------------------------------------

    def ends(self, vp_stage: int | None) -> tuple[bool, bool]:
        """Whether this rank's chunk `vp_stage` holds the first and the last stage. Raises ConfigError without a number."""
        if vp_stage is None:
            raise ConfigError(
                f"schedule {self.options.schedule} has several model chunks per rank: build each with its vp_stage, as for "
                "megatron-core's interleaved schedule"
            )
        placement = self.placement
        stage = placement.rank_to_stages[parallel_state.get_pipeline_model_parallel_rank()][vp_stage]
        return stage == 0, stage == placement.num_stages - 1

    def hybrid_layers(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `HybridModel` that build the layers of its stage under V.

        Args:
            arguments: those that the loop passes.

        Raises:
            ConfigError: there is no pattern, or it does not have one segment per stage, or it has MTP layers.
        """
        pattern = arguments.get("hybrid_layer_pattern")
        if pattern is None:
            raise ConfigError(
                f"schedule {self.options.schedule} places the layers of a HybridModel by its hybrid_layer_pattern: give that, "
                "not one of the deprecated arguments"
            )
        pattern = HybridPattern.parse(pattern).over(self.placement).text
        stack = place_stack(arguments["hybrid_stack_spec"], pattern, self.placement, vp_stage=arguments.get("vp_stage"))
        return {"hybrid_layer_pattern": pattern, "hybrid_stack_spec": stack}

    @property
    def placement(self) -> Placement:
        """Stage -> rank under V. The pipeline's process groups must exist."""
        return self.options.placement(parallel_state.get_pipeline_model_parallel_world_size())

    # -- 4. the schedule is called ----------------------------------------------------------------------------------------

    def run(
        self,
        original: Callable[..., list[Any]],
        *,
        model: Any,
        num_microbatches: int,
        forward_step_func: Callable[..., Any],
        forward_only: bool = False,
        **given: Any,
    ) -> list[Any]:
        """One call of the loop's forward-backward function; arguments and result are megatron-core's. All ranks must call it.

        Args:
            original: megatron-core's function. It runs models that DDP did not wrap where its placement is the schedule's.
            model: as every other argument, megatron-core's.
            num_microbatches: see there.
            forward_step_func: see there.
            forward_only: see there.
            **given: see there.
        """
        self._has_run = True
        chunks = model if isinstance(model, list) else [model]
        strangers = self.adopted.strangers(chunks)
        if strangers and forward_only and not self.options.is_v:
            return original(
                model=model,
                num_microbatches=num_microbatches,
                forward_step_func=forward_step_func,
                forward_only=True,
                **given,
            )
        running = self._models.of(chunks) or self._start(
            chunks, strangers, num_microbatches, usual_tokens=int(given["seq_length"]), forward_only=forward_only
        )
        if strangers and not forward_only:
            raise self._unwrapped(strangers[0])
        engine = running.engine
        self._watch(engine)
        if not strangers:
            self._place_finalize(get_model_config(chunks[0]), engine.schedule.spec.placement)
        if running.steps is not None:
            running.steps.passes_begin()
            if forward_only:
                running.steps.flush()
        running.write_trace()
        if not forward_only:
            self._begin(running, num_microbatches=num_microbatches, micro_batch_size=given["micro_batch_size"])
        passes = partial(
            engine.schedule.forward_backward_func,
            model=model,
            num_microbatches=num_microbatches,
            forward_step_func=self._told(forward_step_func, engine, chunks),
            forward_only=forward_only,
            **given,
        )
        results = running.relayed(passes)
        if running.trace is not None:
            running.trace.finished = engine.schedule.recordings.begun
        if not forward_only:
            running.has_new_plan = engine.is_due
            engine.end()
        self._models.note_groups(running)
        return results

    def _begin(self, running: Running, *, num_microbatches: int, micro_batch_size: int) -> None:
        """Show a plan that is new, and begin a training iteration."""
        engine = running.engine
        if running.has_new_plan or engine.iterations == 0:  # a recorded iteration has ended with its optimizer step
            running.has_new_plan = False
            self._show(engine, num_microbatches)
        engine.begin(num_microbatches=num_microbatches, micro_batch_size=micro_batch_size)

    def _told(self, forward_step_func: Callable[..., Any], engine: Engine, chunks: list[Any]) -> Callable[..., Any]:
        """The loop's function, inside of which Megatron-LM's batches are cut into slices, and questions about stages answered."""
        schedule = engine.schedule
        args = megatron_lm_args() if schedule.spec.num_slices > 1 else None
        if args is not None:
            forward_step_func = sliced_batches(forward_step_func, lambda: schedule.slice_part, args)
        if self.options.is_v:
            forward_step_func = self.questions.answering(forward_step_func, chunks)
        return forward_step_func

    def _start(
        self,
        chunks: Sequence[nn.Module],
        strangers: Sequence[nn.Module],
        num_microbatches: int,
        *,
        usual_tokens: int,
        forward_only: bool,
    ) -> Running:
        """Make what runs a model. What one rank refuses, all do."""
        with refusing_together():
            if self.options.refusal is not None:
                raise self.options.refusal
            if strangers and not forward_only:
                raise self._unwrapped(strangers[0])
            first = None if strangers else self.adopted.find(chunks)
            if first is None:
                self.adopted.check_v(chunks)
        self._status = self.status
        self._models.destroy_unused_groups()
        if first is None:
            running = start_forward_only(self.options, chunks, usual_tokens=usual_tokens)
        else:
            running = start(
                self._options_of_model,
                first,
                chunks,
                self.optimizers,
                num_microbatches=num_microbatches,
                usual_tokens=usual_tokens,
            )
        self._models.add(running)
        return running

    @property
    def _options_of_model(self) -> RunOptions:
        """The options, with what the loop's configuration asked megatron-core for."""
        if OVERLAP_MOE not in self.turned_off:
            return self.options
        return dataclasses.replace(self.options, flags=dataclasses.replace(self.options.flags, zero_bubble_overlap_moe=True))

    def capture_order(self, original: Callable[..., list[int]], num_chunks: int, table: Sequence[Any]) -> list[int]:
        """The order in which megatron-core captures the CUDA graphs of a rank's layers.

        Args:
            original: returns that of its own schedules, for models that no schedule of ours runs.
            num_chunks: of the rank.
            table: (microbatch, chunk) of each F of its own schedule.

        Raises:
            ConfigError: graphs are captured before the model's first iteration, or there are several such models.
        """
        with_graphs = self._with_graphs
        if parallel_state.get_pipeline_model_parallel_world_size() < 2:
            return original()
        if len(with_graphs) != 1:
            raise ConfigError(
                f"CUDA graphs are captured in the order of the plan that runs one model, and schedule {self.options.schedule} "
                f"runs {len(with_graphs)} with graphs: capture them after its first iteration (cuda_graph_warmup_steps)"
            )
        return with_graphs[0].capture_order(len(table) // num_chunks)

    @property
    def graphs(self) -> LayerGraphs | None:
        """The CUDA graphs of the one model that a schedule of ours runs with graphs."""
        with_graphs = self._with_graphs
        return with_graphs[0].graphs if len(with_graphs) == 1 else None

    @property
    def _with_graphs(self) -> list[PipelineSchedule]:
        return [each.engine.schedule for each in self._models if each.engine.schedule.graphs is not None]

    def _unwrapped(self, chunk: nn.Module) -> ConfigError:
        return ConfigError(
            f"schedule {self.options.schedule} cannot train a {type(chunk).__name__} that megatron-core's "
            "DistributedDataParallel did not wrap after megatron.zerobubble.install: install before the model is built, and "
            "wrap each chunk with megatron.core.distributed.DistributedDataParallel (not FSDP, not torch's); without it, "
            "call the schedule with forward_only=True"
        )

    def _watch(self, engine: Engine) -> None:
        """Report what happens in the passes of a model to the watchdog, if there is one."""
        hooks, watch = engine.schedule.hooks, self.supervision.watch
        if watch is not None and hooks.watch is not watch:
            watch.begin_pipeline(dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()))
        hooks.watch = watch

    def _show(self, engine: Engine, num_microbatches: int) -> None:
        """Make the status of a model that starts or has a new plan; rank 0 writes it to stderr. All ranks must call it."""
        schedule = engine.schedule
        measured = engine.costs
        recorded = [] if measured is None else schedule.timelines()
        plan = schedule.plan(num_microbatches)
        self._status = Status.of(
            plan,
            measured or CostModel.uniform(plan.placement),
            schedule=self.options.schedule,
            objective=self.options.objective,
            is_measured=measured is not None,
            recorded=report(recorded[-1]) if recorded else None,
        )
        if dist.get_rank() == 0:
            times = "F = B = W" if measured is None else f"measured {measured.times_text}"
            show_line(self._status.line(times))

    def _place_finalize(self, config: Any, placement: Placement) -> None:
        """Wrap the loop's `finalize_model_grads_func`, whenever it sets one, by what the placement needs besides."""
        given = config.finalize_model_grads_func
        if given is None:
            return
        if not isinstance(given, FinalizeGradients):
            config.finalize_model_grads_func = FinalizeGradients(placement, given)
        self._finalizing[id(config)] = config

    # -- 5. the optimizer steps, with post-validation or recorded ---------------------------------------------------------

    def step(self, optimizer: Any, original: Callable[[Any], StepOutcome]) -> StepOutcome:
        """One call of an optimizer's `step`. All ranks must call it. Raises ConfigError if it cannot be validated afterwards."""
        with ExitStack() as spans:
            for running in self._models:
                recorder = running.engine.schedule.recorder
                if recorder.is_on and trains(optimizer, running.chunks):
                    spans.enter_context(recorder.span(Activity.OPTIMIZER))
            return self._step(optimizer, original)

    def _step(self, optimizer: Any, original: Callable[[Any], StepOutcome]) -> StepOutcome:
        trained = [each for each in self._models if each.steps is not None and each.steps.trains(optimizer)]
        if not trained:
            return original(optimizer)
        if len(trained) > 1:
            raise ConfigError(
                f"post-validation steps one optimizer per model, and schedule {self.options.schedule} runs {len(trained)} models "
                "that this one steps: make an optimizer for each"
            )
        (running,) = trained
        assert running.steps is not None
        outcome = running.steps.step(optimizer)
        self._models.note_groups(running)
        return outcome

    def advanced(self, scheduler: Any, increment: int) -> None:
        """An `OptimizerParamScheduler` has advanced."""
        for running in self._models:
            if running.steps is not None:
                running.steps.advanced(scheduler, increment)

    def zero(self, owner: Any, zero: Callable[[], None]) -> None:
        """Zero the gradients of `owner`, a chunk or an optimizer, at once or when its last step has been validated."""
        for running in self._models:
            if running.steps is not None and running.steps.is_unvalidated and running.steps.owns(owner):
                running.steps.defer(owner, zero)
                return
        zero()

    def settle(self) -> None:
        """Validate the last steps of all models. All ranks must call it."""
        for running in self._models:
            if running.steps is not None:
                running.steps.flush()

    # -- the end ----------------------------------------------------------------------------------------------------------

    def warn_if_unused(self) -> None:
        """Log a warning at the end of a script that ran nothing, unless an exception or a pipeline of one rank is the reason."""
        if not (self._has_run or self.adopted.has_warned or hasattr(sys, "last_value")):
            _log.warning(
                "schedule %s is installed and was never run: the script made no iteration through megatron-core's "
                "get_forward_backward_func() in a pipeline",
                self.options.schedule,
            )

    def close(self) -> None:
        """Undo the split and `finalize_model_grads_func`, and destroy process groups. Every rank of the world must call it."""
        self.supervision.close()
        self._models.close()
        self.adopted.close()
        for config in list(self._finalizing.values()):
            ours = config.finalize_model_grads_func
            if isinstance(ours, FinalizeGradients):
                config.finalize_model_grads_func = ours.finalize
        for config in list(self._configs.values()):
            config.delay_wgrad_compute = False
        self._configs.clear()
        self._finalizing.clear()
