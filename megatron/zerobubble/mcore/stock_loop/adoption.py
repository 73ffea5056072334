"""The model chunks that a stock loop wraps by DDP. Each is split into B and W before that; a schedule's call looks them up.

A chunk that cannot be split is wrapped as it is, and refused by the first call of the schedule: all ranks come there, whereas the
others would not learn of an error here, and would wait for this rank in the loop's next collective.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.mcore.attention.torch_attention import use_torch_attention
from megatron.zerobubble.mcore.config_checks import check_config
from megatron.zerobubble.mcore.ddp.wrap import count_padding_as_data, order_wgrads_by_bucket, with_buckets
from megatron.zerobubble.mcore.model.embeddings import copy_to_mtp_stage, release_unused_head, tie_chunks
from megatron.zerobubble.mcore.model.hybrid_layers import check_hybrid
from megatron.zerobubble.mcore.model.named_weights import draw_by_name
from megatron.zerobubble.mcore.model.wgrad_split import remove_split, split_weight_gradients
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.mcore.stock_loop.graph_options import check_graph_options
from megatron.zerobubble.mcore.stock_loop.layers import layout_text
from megatron.zerobubble.mcore.stock_loop.megatron_lm import megatron_lm_args
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.wgrad.gemm import choose_kernel
from megatron.zerobubble.wgrad.store import WeightGradStore

__all__ = ["Adopted", "AdoptedChunks", "is_stage", "make_store"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Adopted:
    """A chunk that has been split, or refused. It does not keep the chunk, its config or its DDP wrapper alive."""

    module: weakref.ref[nn.Module]
    config: weakref.ref[Any]
    spec: ScheduleSpec
    store: WeightGradStore
    wrapped: weakref.ref[nn.Module] | None = None
    """The DDP wrapper."""
    refusal: tuple[type[UserError], str] | None = None
    """Why it cannot be split, not as an error, whose traceback would keep it alive; None: it was."""


class AdoptedChunks:
    """The chunks that were wrapped by DDP since `install`, as long as they exist.

    Args:
        options: the schedule, and how it is planned.
        ends: `vp_stage` -> whether that chunk of this rank holds the first and the last stage, under V.
    """

    def __init__(self, options: RunOptions, ends: Callable[[int | None], tuple[bool, bool]]) -> None:
        self.options = options
        self.ends = ends
        self._adopted: list[Adopted] = []
        self._stores: weakref.WeakValueDictionary[Any, WeightGradStore] = weakref.WeakValueDictionary()
        """By dtype of weights and of gradients, for as long as a chunk uses one."""
        self.has_warned = False
        """Whether the pipeline has one rank, which is logged once."""
        self._has_logged_buckets = False

    def adopt(self, config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> Adopted | None:
        """Split the chunk, before DDP wraps it, for its deferred weight gradients. Afterwards call `wrap`.

        If that cannot be, because of the chunk, it is refused by `find`.

        Returns:
            None for a module that no pipeline schedule can run, which DDP must wrap as without `install`: the pipeline or the
            model's share of it has one rank, or the module takes no activation of another stage.

        Raises:
            ConfigError: the schedule does not go with the model's config, which is that of all ranks.
        """
        num_ranks = parallel_state.get_pipeline_model_parallel_world_size()
        if num_ranks < 2:
            self._warn()
        if min(num_ranks, config.pipeline_model_parallel_size) < 2 or not is_stage(module):
            self._draw(module)
            self._use_torch_attention(module)
            return None
        layout = config.pipeline_model_parallel_layout
        spec = self.options.spec(
            num_ranks=num_ranks,
            num_chunks=config.virtual_pipeline_model_parallel_size,
            layout=None if layout is None else layout_text(layout),
        )
        check_graph_options(config, self.options)
        check_config(config, spec, knows_lengths=self.options.microbatch_tokens is not None)
        accumulator = torch.float32 if ddp_config.grad_reduce_in_fp32 else config.params_dtype
        key = config.params_dtype, accumulator
        store = self._stores.get(key) or make_store(config, ddp_config, torch.device(torch.cuda.current_device()))
        self._stores[key] = store
        adopted = Adopted(weakref.ref(module, lambda _: self._forget()), weakref.ref(config), spec, store)
        self._adopted.append(adopted)
        try:
            self._split(config, module, adopted)
        except UserError as error:
            _log.warning("the first iteration will be refused on all ranks: %s", error)
            adopted.refusal = type(error), str(error)
        return adopted

    def _split(self, config: Any, module: nn.Module, adopted: Adopted) -> None:
        check_hybrid(module, adopted.spec.placement)
        release_unused_head(module)
        self._draw(module)
        if self.options.is_v:  # before anything that one rank alone may refuse: two ranks may tie their chunks together
            self.check_ends(module)
            self._tie(config, module, adopted.spec.num_chunks)
        self._use_torch_attention(module)
        split_weight_gradients(module, adopted.store)

    def wrap(self, adopted: Adopted, ddp: nn.Module, construct: Callable[..., None], arguments: dict[str, Any]) -> None:
        """Construct the DDP wrapper of an adopted chunk, with buckets in every chunk where checkpoints allow it.

        Args:
            adopted: the chunk.
            ddp: the wrapper.
            construct: its constructor.
            arguments: those that the loop gives.
        """
        in_buckets = self._has_buckets(arguments)
        arguments["ddp_config"] = dataclasses.replace(arguments["ddp_config"], delay_wgrad_compute=True)
        construct(**(with_buckets(arguments) if in_buckets else arguments))
        order_wgrads_by_bucket(ddp)
        if in_buckets:
            count_padding_as_data(ddp)
        adopted.wrapped = weakref.ref(ddp)

    def _has_buckets(self, arguments: Mapping[str, Any]) -> bool:
        """Whether DDP may make other buckets than the loop asks for: checkpoints may store the optimizer's state by bucket."""
        ddp_config, layout = arguments["ddp_config"], arguments.get("full_param_layout")
        if layout is not None and any(getattr(key, "is_managed_by_layer_wise_optimizer", False) for key in layout.layouts):
            return False  # that optimizer's state is sharded by whole parameters
        given = self.options.checkpoints_by_parameter
        allowed = not ddp_config.use_distributed_optimizer or (stores_by_parameter() if given is None else given)
        if ddp_config.overlap_grad_reduce and not allowed and given is None and not self._has_logged_buckets:
            self._has_logged_buckets = True
            if self.options.rank == 0:
                _log.warning(
                    "schedule %s: gradients of most chunks are reduced in one piece after the last W, because the distributed "
                    "optimizer's checkpoints may store its state by bucket; if they store it by parameter (Megatron-LM's "
                    "--dist-ckpt-optim-fully-reshardable, or install(checkpoints_by_parameter=True)), buckets are reduced "
                    "while W runs",
                    self.options.schedule,
                )
        return allowed

    def strangers(self, chunks: Sequence[nn.Module]) -> list[nn.Module]:
        """Those of `chunks` that were not adopted."""
        known = {id(ddp) for each in self._adopted if each.wrapped is not None and (ddp := each.wrapped()) is not None}
        return [chunk for chunk in chunks if id(chunk) not in known]

    def find(self, chunks: Sequence[nn.Module]) -> Adopted:
        """The first of a model's chunks, all of which were adopted.

        Raises:
            ConfigError: they are not all chunks of one model.
            UserError: why one of them could not be split.
        """
        of = {id(ddp): each for each in self._adopted if each.wrapped is not None and (ddp := each.wrapped()) is not None}
        first, *others = [of[id(chunk)] for chunk in chunks]
        for each in (first, *others):
            if each.refusal is not None:
                kind, text = each.refusal
                raise kind(text)
        if len(chunks) != first.spec.num_chunks or any(each.store is not first.store for each in others):
            raise ConfigError(
                f"schedule {self.options.schedule} takes a model of {first.spec.num_chunks} chunk(s) of one dtype, got "
                f"{len(chunks)}: give the list of all of this rank's chunks"
            )
        return first

    def close(self) -> None:
        """Undo the split of the chunks that still exist."""
        for each in self._adopted:
            module = each.module()
            if module is not None:
                remove_split(module)
        self._adopted.clear()

    def _use_torch_attention(self, module: nn.Module) -> None:
        """In any module that DDP wraps, if it was asked for."""
        if self.options.flags.zero_bubble_torch_attention:
            use_torch_attention(module)

    def _draw(self, module: nn.Module) -> None:
        """Draw the weights of any module that DDP wraps, if a seed was given."""
        if self.options.seeds.weights is not None and hasattr(module, "sharded_state_dict"):
            draw_by_name(module, seed=self.options.seeds.weights)

    def _forget(self) -> None:
        """A chunk is gone: let go of its store, and of what an iteration that failed has left there."""
        self._adopted = [each for each in self._adopted if each.module() is not None]

    def _warn(self) -> None:
        if not self.has_warned:
            self.has_warned = True
            _log.warning(
                "schedule %s is installed and the pipeline has one rank: megatron-core's schedule without a pipeline and its "
                "optimizer step run as without install",
                self.options.schedule,
            )

    def check_ends(self, module: nn.Module) -> None:
        """Raise ConfigError if a chunk was not built with the ends of the model that it has under V."""
        model = self._stage_of(module)
        first, last = self.ends(model.vp_stage)
        if (model.pre_process, model.post_process) != (first, last):
            raise ConfigError(
                f"chunk {model.vp_stage} of pipeline rank {parallel_state.get_pipeline_model_parallel_rank()} was built with "
                f"pre_process={model.pre_process}, post_process={model.post_process}; under {self.options.schedule} they are "
                f"{first} and {last}: ask parallel_state.is_pipeline_first_stage and is_pipeline_last_stage with "
                "ignore_virtual=False and vp_stage, after megatron.zerobubble.install"
            )

    def _stage_of(self, chunk: nn.Module) -> Any:
        """The model inside of a chunk, which knows its stage. Raises ConfigError if it does not."""
        for name in ("vp_stage", "pre_process", "post_process"):
            try:
                model = get_attr_wrapped_model(chunk, name, return_model_obj=True)
            except RuntimeError:
                raise ConfigError(
                    f"schedule {self.options.schedule} was given a {type(chunk).__name__} without {name}, so its stage "
                    "in the V is unknown: set vp_stage, pre_process and post_process, as GPTModel does, or choose a schedule "
                    "without a V"
                ) from None
        return model

    def check_v(self, chunks: Sequence[nn.Module]) -> None:
        """Raise ConfigError if the chunks of a model that DDP did not wrap are not those of a V, in their order."""
        for number, chunk in enumerate(chunks):
            given = self._stage_of(chunk).vp_stage
            if given != number:
                raise ConfigError(
                    f"schedule {self.options.schedule} was given chunk {given} in the place of chunk {number}: give a model's "
                    "chunks in the order of their vp_stage"
                )
            self.check_ends(chunk)

    def _tie(self, config: Any, chunk: nn.Module, num_chunks: int) -> None:
        """Under V: start all copies of the embedding from it, in a tied head of the last chunk and in MTP layers."""
        number = get_attr_wrapped_model(chunk, "vp_stage")
        of_config = [module for each in self._adopted if each.config() is config and (module := each.module()) is not None]
        earlier = [module for module in of_config if module is not chunk]
        if number == 0:
            return
        if not earlier or get_attr_wrapped_model(earlier[-1], "vp_stage") != number - 1:
            raise ConfigError(f"chunk {number} was wrapped by DDP before chunk {number - 1}: wrap a model's chunks in order")
        if number == num_chunks - 1:
            chunks = [*earlier[-number:], chunk]
            tie_chunks(chunks)
            copy_to_mtp_stage(chunks, config)


def make_store(config: Any, ddp_config: DistributedDataParallelConfig, device: torch.device) -> WeightGradStore:
    """The store of deferred weight gradients for this rank's chunks.

    Args:
        config: TransformerConfig of the chunks.
        ddp_config: with which DDP wraps them; decides the dtype of main gradients.
        device: of the weights.
    """
    accumulator = torch.float32 if ddp_config.grad_reduce_in_fp32 else config.params_dtype
    kernel = choose_kernel(
        device,
        input_dtype=config.params_dtype,
        accumulator_dtype=accumulator,
        allow_apex=config.gradient_accumulation_fusion,
    )
    return WeightGradStore(kernel, rank=parallel_state.get_pipeline_model_parallel_rank())


def is_stage(module: nn.Module) -> bool:
    """Whether a pipeline schedule can run the module: it takes the activations of the stage before, as each of them demands."""
    each: Any = module
    while each is not None:
        if hasattr(each, "set_input_tensor"):
            return True
        each = getattr(each, "module", None)
    return False


def stores_by_parameter() -> bool:
    """Whether Megatron-LM's loop stores a distributed optimizer's state by parameter, or nothing; False in another loop."""
    args = megatron_lm_args()
    if args is None:
        return False
    has_checkpoints = args.save is not None or args.load is not None
    return not has_checkpoints or (args.ckpt_format == "torch_dist" and getattr(args, "dist_ckpt_optim_fully_reshardable", False))
