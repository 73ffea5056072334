"""The model chunks that a stock loop wraps by DDP. Each is split into B and W before that; a schedule's call looks them up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.build import check_config, make_store
from megatron.zerobubble.mcore.ddp.wrap import order_wgrads_by_bucket
from megatron.zerobubble.mcore.model.attention import use_torch_attention
from megatron.zerobubble.mcore.model.embeddings import release_unused_head, tie_chunks
from megatron.zerobubble.mcore.model.hybrid import check_hybrid
from megatron.zerobubble.mcore.model.named_weights import draw_by_name
from megatron.zerobubble.mcore.model.wgrad_split import remove_split, split_weight_gradients
from megatron.zerobubble.mcore.stock_loop.options import StockLoopOptions
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.wgrad.store import WeightGradStore

__all__ = ["Adopted", "AdoptedChunks"]


@dataclass(eq=False)
class Adopted:
    """A chunk that has been split, and the DDP wrapper around it."""

    module: nn.Module
    config: Any
    spec: ScheduleSpec
    store: WeightGradStore
    wrapped: nn.Module | None = None


class AdoptedChunks:
    """The chunks that were wrapped by DDP since `install`.

    Args:
        options: the schedule, and how it is planned.
        ends: `vp_stage` -> whether that chunk of this rank holds the first and the last stage, under V.
    """

    def __init__(self, options: StockLoopOptions, ends: Callable[[int | None], tuple[bool, bool]]) -> None:
        self.options = options
        self.ends = ends
        self._adopted: list[Adopted] = []
        self._stores: dict[tuple[torch.dtype, torch.dtype], WeightGradStore] = {}

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
        self._adopted.append(Adopted(module, config, spec, self._stores[key]))
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

    def find(self, chunks: Sequence[nn.Module]) -> Adopted:
        """The first of a model's chunks, all of which were adopted. Raises ConfigError."""
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
        return first

    def close(self) -> None:
        """Undo the split."""
        for each in self._adopted:
            remove_split(each.module)
        self._adopted.clear()
