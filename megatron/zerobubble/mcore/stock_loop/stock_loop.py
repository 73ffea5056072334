"""A schedule of ours in a stock loop, one that is written for megatron-core and builds its own model, DDP and optimizer.

Our own loop calls `build_chunks`. `StockLoop` does the same work at the four points that every stock loop passes, where
`install` calls it:

1. a TransformerConfig is made: the layers of each stage under V, and Transformer Engine's `delay_wgrad_compute`;
2. a model chunk is built: whether it holds the first or the last stage;
3. DDP wraps the chunk: the B/W split, tied embeddings, and DDP's part of the contract (`mcore.model.wgrad_split`);
4. the forward-backward function is called: `PipelineSchedule`, and under V the gradients that `finalize_model_grads` leaves out,
   questions for the running stage (`stage_questions`), and the losses on the rank that logs them (`results`).

The loop must build as many chunks per rank as the schedule has, as for megatron-core's own interleaved schedule (virtual
pipeline size, `vp_stage`, one data iterator per chunk), and wrap each with megatron-core's DistributedDataParallel.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.attention.torch_attention import use_torch_attention
from megatron.zerobubble.mcore.build import check_config, make_store
from megatron.zerobubble.mcore.compat import has_hybrid_model
from megatron.zerobubble.mcore.ddp.wrap import order_wgrads_by_bucket
from megatron.zerobubble.mcore.microbatches.iteration_plans import UnequalOptions, attention_share
from megatron.zerobubble.mcore.microbatches.length_exchange import TokensOf
from megatron.zerobubble.mcore.model.embeddings import Finalize, FinalizeGradients, release_unused_head, tie_chunks
from megatron.zerobubble.mcore.model.hybrid_layers import check_hybrid, place_stack
from megatron.zerobubble.mcore.model.layout_dropout import LayoutDropout, check_layout_dropout
from megatron.zerobubble.mcore.model.named_weights import draw_by_name, remember_from
from megatron.zerobubble.mcore.model.stage_layout import StageLayout
from megatron.zerobubble.mcore.model.wgrad_split import remove_split, split_weight_gradients
from megatron.zerobubble.mcore.replanner import Replanner, Window, budget_of
from megatron.zerobubble.mcore.state_memory import state_bytes, usable_bytes
from megatron.zerobubble.mcore.stock_loop.optimistic_steps import OptimisticSteps, PostValidationOptions, StepOutcome
from megatron.zerobubble.mcore.stock_loop.result_relay import ResultRelay
from megatron.zerobubble.mcore.stock_loop.stage_questions import StageQuestions
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.registry import schedule_info
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.profiling.profile import RankProfile
from megatron.zerobubble.wgrad.store import WeightGradStore

__all__ = ["ByteLimit", "StockLoop", "StockLoopOptions"]


@dataclass(frozen=True, kw_only=True)
class ByteLimit:
    """A memory limit per rank in bytes. It takes effect when passes, and the optimizer's state, have been measured."""

    total_bytes: int | None
    """Weights, gradients, optimizer state and activations; None: what the device has."""
    ranks_on_host: int
    """Ranks that share the machine, and on the CPU its memory."""

    def headroom_bytes(self, device: torch.device, taken: int) -> int:
        """Bytes left for activations where `taken` are in use."""
        total = self.total_bytes or usable_bytes(device, ranks_on_host=self.ranks_on_host)
        return total - taken


@dataclass(frozen=True, kw_only=True)
class StockLoopOptions:
    """Which schedule a stock loop runs, and how it is planned."""

    schedule: str
    """A name of `megatron.zerobubble.plan.registry`."""
    spec_of: Callable[[int, int], ScheduleSpec]
    """(pipeline ranks, chunks per rank) -> that schedule with its limits. Raises ConfigError."""
    timed: Window | None = None
    """Training iterations, counted from the first one after `install`, that are profiled for re-planning; None: none."""
    planning_seconds: float = 10.0
    """About how long one rank then searches for a better order."""
    p2p_max_ctas: int | None = None
    """Most CTAs of a transfer between stages on NCCL; None leaves it to NCCL."""
    torch_attention: bool = False
    """Whether torch's attention replaces megatron-core's own."""
    post_validation: PostValidationOptions | None = None
    """How optimizer steps are taken optimistically; None: by megatron-core's own `step`."""
    microbatch_tokens: TokensOf | None = None
    """Length of a microbatch of the loop's data; None: all have the sequence length of the schedule's call."""
    reorder_microbatches: bool = True
    """Whether microbatches of unequal length may run in another order than that in which they come."""
    memory_limit: ByteLimit | None = None
    """Most memory per rank, with weights, gradients and optimizer state; None: no limit in bytes."""
    weights_seed: int | None = None
    """Seed of first weights that are drawn by name (`named_weights`); None: as megatron-core drew them."""

    dropout_seed: int | None = None
    """Seed of dropout masks that are drawn by layer and sample (`layout_dropout`); None: as megatron-core draws them."""

    @property
    def is_v(self) -> bool:
        """Whether the first and the last stage are on the same rank."""
        return schedule_info(self.schedule).placement == "V"

    def spec(self, *, num_ranks: int, num_chunks: int | None) -> ScheduleSpec:
        """The schedule for a pipeline of this size.

        Args:
            num_ranks: p.
            num_chunks: v, as the loop chose it; None is 1.

        Raises:
            ConfigError: the schedule cannot run with these sizes; the message names those that the loop must be started with.
        """
        if num_ranks < 2:
            raise ConfigError(
                f"schedule {self.schedule} fills the bubble between pipeline ranks and needs a pipeline_model_parallel_size "
                f"of at least 2, got {num_ranks}; do not install it, or start more pipeline ranks"
            )
        info, given = schedule_info(self.schedule), num_chunks or 1
        if info.placement == "W":
            raise ConfigError(
                f"schedule {self.schedule} runs in this project's own training loop only; choose zbv or zb-interleaved here"
            )
        wanted = info.num_chunks if info.num_chunks is not None else max(2, given)
        if given != wanted:
            raise ConfigError(
                f"schedule {self.schedule} has {wanted} model chunk(s) per rank, the loop was started with "
                f"virtual_pipeline_model_parallel_size {num_chunks}: give {wanted if wanted > 1 else None} there and in "
                "initialize_model_parallel, and build the chunks as for megatron-core's interleaved schedule (a V has two chunks "
                "per rank, zb-interleaved any number from two)"
            )
        return self.spec_of(num_ranks, wanted)


@dataclass(eq=False)
class _Adopted:
    """A chunk that has been split, and the DDP wrapper around it."""

    module: nn.Module
    config: Any
    spec: ScheduleSpec
    store: WeightGradStore
    wrapped: nn.Module | None = None


@dataclass(eq=False)
class _Running:
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
    iterations: int = 0
    """Training iterations so far."""


class StockLoop:
    """One installation's chunks, stores and schedules.

    Args:
        options: the schedule, and how it is planned.
    """

    def __init__(self, options: StockLoopOptions) -> None:
        self.options = options
        self.undo: list[tuple[Any, str, Any]] = []
        """(owner, name, original value) of everything that `install` replaced, in that order."""
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        """With a memory limit in bytes: megatron-core's optimizers that were made since, without chains of them."""
        self.questions = StageQuestions(self.ends)
        """Which chunk runs, under V."""
        self._configs: dict[int, weakref.ref[Any]] = {}
        """By identity, those that still exist: a loop may make one per microbatch, and they cannot be hashed."""
        self._adopted: list[_Adopted] = []
        self._running: list[_Running] = []
        self._stores: dict[tuple[torch.dtype, torch.dtype], WeightGradStore] = {}
        self._finalizers: list[tuple[Any, Finalize, Finalize]] = []

    # -- 1. a TransformerConfig is made -----------------------------------------------------------------------------------

    def configure(self, config: Any) -> None:
        """Set the layers of each stage under V, before megatron-core checks a new `config`. Raises ConfigError."""
        num_ranks = config.pipeline_model_parallel_size
        if num_ranks > 1:
            config.delay_wgrad_compute = False  # set by `configured`, if this config is made from another one
        if not self.options.is_v or num_ranks < 2 or getattr(config, "is_hybrid_model", False):
            return  # the pattern of a HybridModel has the layers of each stage
        layout = config.pipeline_model_parallel_layout
        if layout is None or isinstance(layout, str):
            spec = self.options.spec(num_ranks=num_ranks, num_chunks=config.virtual_pipeline_model_parallel_size)
            layers = _spread(config.num_layers, spec.placement) if layout is None else StageLayers.parse(layout)
            config.pipeline_model_parallel_layout = StageLayout(layers, spec.placement, num_mtp_layers=config.mtp_num_layers or 0)
        elif not isinstance(layout, StageLayout):
            raise ConfigError(
                f"pipeline_model_parallel_layout is a {type(layout).__name__}, whose stages sit in a loop, and schedule "
                f"{self.options.schedule} places them in a V: give it as text, in the order data flows, or leave it out"
            )

    def configured(self, config: Any) -> None:
        """Let Transformer Engine leave weight gradients to W. After megatron-core's checks, which demand MoE overlap for this."""
        if self.options.weights_seed is not None:
            remember_from(config)
        if config.pipeline_model_parallel_size > 1:
            config.delay_wgrad_compute = True
            key, configs = id(config), self._configs
            configs[key] = weakref.ref(config, lambda _: configs.pop(key, None))

    # -- 2. a chunk is built ----------------------------------------------------------------------------------------------

    def ends(self, vp_stage: int | None) -> tuple[bool, bool]:
        """Whether this rank's chunk `vp_stage` holds the first and the last stage. Raises ConfigError without a number."""
        if vp_stage is None:
            raise ConfigError(
                f"schedule {self.options.schedule} has two model chunks per rank: build each with its vp_stage, as for "
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
        """Stage -> rank of a schedule in a V. The pipeline's process groups must exist."""
        return Placement.v(parallel_state.get_pipeline_model_parallel_world_size())

    # -- 3. DDP wraps it --------------------------------------------------------------------------------------------------

    def adopt(self, config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> DistributedDataParallelConfig:
        """Split the chunk, and return the configuration with which DDP must wrap it.

        Raises:
            ConfigError: the schedule, or torch's attention, does not go with the loop's settings.
            SplitError: a weight's gradient cannot be deferred.
        """
        spec = self.options.spec(
            num_ranks=parallel_state.get_pipeline_model_parallel_world_size(),
            num_chunks=config.virtual_pipeline_model_parallel_size,
        )
        check_config(config, spec, knows_lengths=self.options.microbatch_tokens is not None)
        check_hybrid(module)
        if self.options.torch_attention:
            use_torch_attention(module)
        release_unused_head(module)
        if self.options.weights_seed is not None:
            draw_by_name([module], seed=self.options.weights_seed)
        accumulator = torch.float32 if ddp_config.grad_reduce_in_fp32 else config.params_dtype
        key = config.params_dtype, accumulator
        if key not in self._stores:
            self._stores[key] = make_store(config, ddp_config, torch.device(torch.cuda.current_device()))
        if self.options.is_v:
            self._check_ends(module)
            self._tie(config, module)
        split_weight_gradients(module, self._stores[key])
        self._adopted.append(_Adopted(module, config, spec, self._stores[key]))
        return dataclasses.replace(ddp_config, delay_wgrad_compute=True)

    def wrapped(self, ddp: nn.Module) -> None:
        """Take the DDP wrapper of the chunk that was adopted last. Its buckets are the loop's own."""
        order_wgrads_by_bucket(ddp)
        self._adopted[-1].wrapped = ddp

    def _check_ends(self, module: nn.Module) -> None:
        model: Any = get_attr_wrapped_model(module, "pre_process", return_model_obj=True)
        first, last = self.ends(model.vp_stage)
        if (model.pre_process, model.post_process) != (first, last):
            raise ConfigError(
                f"chunk {model.vp_stage} of pipeline rank {parallel_state.get_pipeline_model_parallel_rank()} was built with "
                f"pre_process={model.pre_process}, post_process={model.post_process}; under {self.options.schedule} they are "
                f"{first} and {last}: ask parallel_state.is_pipeline_first_stage and is_pipeline_last_stage with "
                "ignore_virtual=False and vp_stage, after megatron.zerobubble.install"
            )

    def _tie(self, config: Any, module: nn.Module) -> None:
        """Under V with tied embeddings: start the head of the second chunk from the embedding of the first."""
        number = get_attr_wrapped_model(module, "vp_stage")
        earlier = [each.module for each in self._adopted if each.config is config]
        if number == 0:
            return
        if not earlier or get_attr_wrapped_model(earlier[-1], "vp_stage") != number - 1:
            raise ConfigError(f"chunk {number} was wrapped by DDP before chunk {number - 1}: wrap a model's chunks in order")
        tie_chunks([earlier[-1], module])

    # -- 4. the schedule is called ----------------------------------------------------------------------------------------

    def run(
        self,
        *,
        model: Any,
        num_microbatches: int,
        forward_step_func: Callable[..., Any],
        forward_only: bool = False,
        **given: Any,
    ) -> list[Any]:
        """One call of the loop's forward-backward function; arguments and result are megatron-core's. All ranks must call it."""
        chunks = model if isinstance(model, list) else [model]
        running = next((each for each in self._running if each.chunks == chunks), None) or self._start(
            chunks, num_microbatches, usual_tokens=int(given["seq_length"])
        )
        self._place_finalize(get_model_config(chunks[0]), running.schedule.spec.placement)
        if forward_only and running.steps is not None:
            running.steps.flush()
        replanner = None if forward_only else running.replanner
        if not forward_only:
            if running.dropout is not None:
                size = given["micro_batch_size"]
                apart = parallel_state.get_data_parallel_world_size() * size
                own = running.iterations * num_microbatches * apart + parallel_state.get_data_parallel_rank() * size
                running.dropout.begin(first_sample=own, samples_apart=apart)
            running.iterations += 1
        if replanner is not None:
            replanner.before(running.iterations, num_microbatches)
        if self.options.is_v:
            forward_step_func = self.questions.answering(forward_step_func, chunks)
        results = running.schedule.forward_backward_func(
            model=model,
            num_microbatches=num_microbatches,
            forward_step_func=forward_step_func,
            forward_only=forward_only,
            **given,
        )
        if running.relay is not None:
            results = running.relay(results)
        if replanner is not None and replanner.is_due(running.iterations):
            replanner.after(running.iterations, num_microbatches)
        return results

    def _start(self, chunks: Sequence[nn.Module], num_microbatches: int, *, usual_tokens: int) -> _Running:
        known = {id(each.wrapped): each for each in self._adopted}
        strangers = [chunk for chunk in chunks if id(chunk) not in known]
        if strangers:
            raise ConfigError(
                f"schedule {self.options.schedule} was given a {type(strangers[0]).__name__} that megatron-core's "
                "DistributedDataParallel did not wrap after megatron.zerobubble.install: install before the model is built, and "
                "wrap each chunk with megatron.core.distributed.DistributedDataParallel (not FSDP, not torch's)"
            )
        adopted = [known[id(chunk)] for chunk in chunks]
        first = adopted[0]
        if len(chunks) != first.spec.num_chunks or any(each.store is not first.store for each in adopted):
            raise ConfigError(
                f"schedule {self.options.schedule} takes a model of {first.spec.num_chunks} chunk(s) of one dtype, got "
                f"{len(chunks)}: give the list of all of this rank's chunks"
            )
        spec = first.spec
        if self.options.memory_limit is not None:  # until memory is measured: one microbatch per rank, the least possible
            spec = dataclasses.replace(spec, memory_limit=1.0 / min(spec.num_ranks, num_microbatches))
        schedule = PipelineSchedule(
            spec,
            chunks,
            store=first.store,
            config=get_model_config(chunks[0]),
            p2p_max_ctas=self.options.p2p_max_ctas,
            unequal=self._unequal(get_model_config(chunks[0]), usual_tokens),
        )
        relay = None
        if self.options.is_v:
            relay = ResultRelay(parallel_state.get_pipeline_model_parallel_group(), schedule.device)
        steps = None
        if self.options.post_validation is not None:
            steps = OptimisticSteps(self.options.post_validation, schedule, chunks)
        dropout = None
        if self.options.dropout_seed is not None:
            check_layout_dropout(get_model_config(chunks[0]))
            dropout = LayoutDropout(chunks, seed=self.options.dropout_seed, device=schedule.device)
        replanner = self._make_replanner(schedule, chunks, num_microbatches)
        running = _Running(list(chunks), schedule, replanner, relay, steps, dropout)
        self._running.append(running)
        return running

    def _unequal(self, config: Any, usual_tokens: int) -> UnequalOptions | None:
        """How microbatches of unequal length are planned; None: they are equal."""
        if self.options.microbatch_tokens is None:
            return None
        return UnequalOptions(
            tokens_of=self.options.microbatch_tokens,
            usual_tokens=usual_tokens,
            attention_share=attention_share(config, usual_tokens),
            reorders=self.options.reorder_microbatches,
            objective=self._objective,
        )

    @property
    def _objective(self) -> Objective:
        """A synchronous optimizer waits for all ranks: the iteration takes from the first op of any to the last op of any."""
        return Objective.MAKESPAN if self.options.post_validation is None else Objective.SPAN

    def _make_replanner(self, schedule: PipelineSchedule, chunks: Sequence[nn.Module], num_microbatches: int) -> Replanner | None:
        options = self.options
        if options.timed is None:
            return None
        search = SearchOptions(objective=self._objective, budget=budget_of(options.planning_seconds))
        limit = options.memory_limit
        if limit is None:
            return Replanner(schedule, options.timed, search, num_microbatches=num_microbatches)

        def own_state_bytes() -> int:
            return self._state_bytes(chunks)

        def headroom_bytes(profile: RankProfile) -> int:
            return limit.headroom_bytes(schedule.device, own_state_bytes() + profile.workspace_bytes)

        return Replanner(
            schedule,
            options.timed,
            search,
            num_microbatches=num_microbatches,
            headroom_bytes=headroom_bytes,
            state_bytes=own_state_bytes,
        )

    def _state_bytes(self, chunks: Sequence[nn.Module]) -> int:
        """Bytes of weights, gradients and optimizer state. Raises ConfigError if the optimizer is not megatron-core's."""
        optimizers = list(self.optimizers)
        if not optimizers:
            raise ConfigError(
                f"schedule {self.options.schedule} has a memory limit in bytes, and no optimizer of megatron-core was made since "
                "megatron.zerobubble.install: make it by get_megatron_optimizer, or give the limit as a number (1 is 1F1B's)"
            )
        return state_bytes(chunks, SimpleNamespace(chained_optimizers=optimizers))

    def _place_finalize(self, config: Any, placement: Placement) -> None:
        """Wrap the loop's `finalize_model_grads_func`, whenever it sets one, by what the placement needs besides."""
        given = config.finalize_model_grads_func
        if given is None or any(config is known and given is ours for known, _, ours in self._finalizers):
            return
        ours = FinalizeGradients(placement, given)
        self._finalizers.append((config, given, ours))
        config.finalize_model_grads_func = ours

    # -- 5. the optimizer steps, with post-validation ---------------------------------------------------------------------

    def step(self, optimizer: Any, original: Callable[[Any], StepOutcome]) -> StepOutcome:
        """One call of an optimizer's `step`. All ranks must call it. Raises ConfigError if it cannot be validated afterwards."""
        steps = [running.steps for running in self._running if running.steps is not None]
        if not steps:
            return original(optimizer)
        if len(steps) > 1:
            raise ConfigError(f"post-validation trains one model, and schedule {self.options.schedule} runs {len(steps)}")
        return steps[0].step(optimizer)

    def zero(self, owner: Any, zero: Callable[[], None]) -> None:
        """Zero the gradients of `owner`, a chunk or an optimizer, at once or when its last step has been validated."""
        for running in self._running:
            if running.steps is not None and running.steps.is_unvalidated and running.steps.owns(owner):
                running.steps.defer(owner, zero)
                return
        zero()

    # -- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Undo the split and `finalize_model_grads_func`, and destroy process groups. Every rank of the world must call it."""
        for running in self._running:
            if running.steps is not None:
                running.steps.close()
            running.schedule.close()
            if running.relay is not None:
                running.relay.close()
            if running.dropout is not None:
                running.dropout.remove()
        for each in self._adopted:
            remove_split(each.module)
        for config, given, ours in self._finalizers:
            if config.finalize_model_grads_func is ours:
                config.finalize_model_grads_func = given
        for config in [reference() for reference in self._configs.values()]:
            if config is not None:
                config.delay_wgrad_compute = False
        self._configs.clear()
        self._running.clear()
        self._adopted.clear()
        self._finalizers.clear()


def _spread(num_layers: int, placement: Placement) -> StageLayers:
    try:
        return StageLayers.spread(num_layers, placement)
    except ConfigError as error:
        hint = "; a HybridModel, whose pattern has the layers of each stage, needs a TransformerConfig with is_hybrid_model=True"
        raise ConfigError(f"{error}{hint if has_hybrid_model() else ''}") from None
