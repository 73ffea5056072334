"""A rank's chunks of a model, split and wrapped as those that a loop builds under `install`, for a schedule without a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import layers
from torch import nn

from megatron.zerobubble.mcore.agreement import refusing_together
from megatron.zerobubble.mcore.compat import define_missing_te_gemm
from megatron.zerobubble.mcore.config_checks import check_config, turn_off
from megatron.zerobubble.mcore.ddp.wrap import count_padding_as_data, order_wgrads_by_bucket, with_buckets
from megatron.zerobubble.mcore.model.embeddings import FinalizeGradients, release_unused_head, tie_chunks
from megatron.zerobubble.mcore.model.float16 import StageFloat16Module
from megatron.zerobubble.mcore.model.named_weights import draw_by_name, remember_from, replacements
from megatron.zerobubble.mcore.model.stage_layout import StageLayout
from megatron.zerobubble.mcore.model.transformer_engine import defer_to_w
from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
from megatron.zerobubble.mcore.stock_loop.adoption import make_store
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.wgrad.store import WeightGradStore

__all__ = ["ModelChunks", "build_chunks", "pipeline_layout"]


@dataclass(frozen=True)
class ModelChunks:
    """A rank's part of the model."""

    chunks: list[Any]
    """One DistributedDataParallel per chunk, in the order of their stages."""
    store: WeightGradStore | None
    """Holds the deferred weight gradients between B and W; None for megatron-core's own schedules."""


def build_chunks(
    provide: Callable[[bool, bool, int | None], nn.Module],
    *,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    spec: ScheduleSpec,
    weights_seed: int | None = None,
) -> ModelChunks:
    """Build this rank's chunks and prepare `config` for the schedule. All ranks must call it.

    Args:
        provide: (pre_process, post_process, vp_stage) -> one chunk.
        config: TransformerConfig of the model.
        ddp_config: how gradients are accumulated and reduced.
        spec: the schedule.
        weights_seed: first weights are drawn by this seed and their names; None: as megatron-core does.
    """
    if config.num_moe_experts is not None:
        define_missing_te_gemm()
    if not spec.is_stock:
        turn_off(config, set())
        check_config(config, spec)
        defer_to_w(config)
    models = _models(provide, config, spec, weights_seed)
    config.finalize_model_grads_func = FinalizeGradients(spec.placement, finalize_model_grads)
    store = None
    if not spec.is_stock:
        store = make_store(config, ddp_config, torch.device(torch.cuda.current_device()))
        with refusing_together():
            for model in models:
                split_weight_gradients(model, store)
        ddp_config = dataclasses.replace(ddp_config, delay_wgrad_compute=True)
    chunks = []
    for number, model in enumerate(models):
        arguments: dict[str, Any] = {"config": config, "ddp_config": ddp_config, "module": model}
        own = {"disable_bucketing": number > 0}
        chunk = DistributedDataParallel(**(arguments | own if spec.is_stock else with_buckets(arguments)))
        order_wgrads_by_bucket(chunk)
        count_padding_as_data(chunk)
        chunks.append(chunk)
    if ddp_config.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return ModelChunks(chunks, store)


def _models(provide: Callable[..., nn.Module], config: Any, spec: ScheduleSpec, weights_seed: int | None) -> Sequence[nn.Module]:
    """The chunks on the device, in their precision, with embedding and output layer tied."""
    placement = spec.placement
    stages = placement.rank_to_stages[parallel_state.get_pipeline_model_parallel_rank()]
    models: list[nn.Module] = []
    with _fusion_without_apex(config, models), ExitStack() as remembering:
        if weights_seed is not None:
            remember_from(config)
            for owner, name, replacement in replacements():
                remembering.enter_context(mock.patch.object(owner, name, replacement))
        for chunk, stage in enumerate(stages):
            vp_stage = chunk if len(stages) > 1 else None
            models.append(provide(stage == 0, stage == placement.num_stages - 1, vp_stage))
    for model in models:
        release_unused_head(model)
        for parameter in model.parameters():
            layers.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if weights_seed is not None:
        draw_by_name(models, seed=weights_seed)
    models = [model.to(torch.cuda.current_device()) for model in models]
    if config.fp16 or config.bf16:
        models = [StageFloat16Module(config, model) for model in models]
    tie_chunks(models)
    return models


def pipeline_layout(stages: StageLayers, placement: Placement, *, num_mtp_layers: int = 0) -> StageLayout | str | None:
    """The value of `TransformerConfig.pipeline_model_parallel_layout` for these layers of stages; None: megatron-core's own."""
    if placement.name not in ("linear", "loop"):
        return StageLayout(stages, placement, num_mtp_layers=num_mtp_layers)
    return None if stages.is_even else stages.text.removesuffix("L") + "m" * num_mtp_layers + "L"


@contextmanager
def _fusion_without_apex(config: Any, models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, Transformer Engine's layers can be built with `gradient_accumulation_fusion` where apex is not installed.

    megatron-core's own linears of `models`, the chunks that are built, get the option off afterwards: their backward would call
    apex. Split ones have a kernel of `wgrad.gemm`.
    """
    wanted = config.gradient_accumulation_fusion and config.transformer_impl == "transformer_engine"
    if not wanted or getattr(layers, "_grad_accum_fusion_available", True):
        yield
        return
    with mock.patch.object(layers, "_grad_accum_fusion_available", True):
        yield
    for module in (each for model in models for each in model.modules()):
        if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
            module.gradient_accumulation_fusion = False
