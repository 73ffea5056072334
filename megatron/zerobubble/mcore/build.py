"""Building a rank's model chunks for a placement: construct, tie embeddings, split B and W, wrap with DDP."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import LayerType
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.agreement import refusing_together
from megatron.zerobubble.mcore.compat import check_megatron_core, define_missing_te_gemm, makes_fused_experts_as_known
from megatron.zerobubble.mcore.ddp.wrap import wrap_chunks
from megatron.zerobubble.mcore.microbatches.length_exchange import GIVE_LENGTHS
from megatron.zerobubble.mcore.model.embeddings import FinalizeGradients, release_unused_head, tie_chunks
from megatron.zerobubble.mcore.model.float16 import StageFloat16Module
from megatron.zerobubble.mcore.model.named_weights import draw_by_name, remember_init_methods
from megatron.zerobubble.mcore.model.stage_layout import StageLayout
from megatron.zerobubble.mcore.model.transformer_engine import defer_to_w, fusion_without_apex
from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
from megatron.zerobubble.mcore.slices.refusals import check_sliced_config
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.wgrad.gemm import choose_kernel
from megatron.zerobubble.wgrad.store import WeightGradStore

logger = logging.getLogger(__name__)

ModelProvider = Callable[[bool, bool, int | None], nn.Module]
"""(pre_process, post_process, vp_stage) -> one model chunk."""


@dataclass(frozen=True)
class ModelChunks:
    """A rank's part of the model."""

    chunks: list[Any]
    """One DistributedDataParallel per chunk, in the order of their stages."""
    store: WeightGradStore | None
    """Holds the deferred weight gradients between B and W; None for stock schedules."""


def build_chunks(
    model_provider: ModelProvider,
    *,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    spec: ScheduleSpec,
    weights_seed: int | None = None,
) -> ModelChunks:
    """Build this rank's chunks and prepare `config` for the schedule.

    Sets `config.finalize_model_grads_func` and `config.no_sync_func`. All ranks must call it.

    Args:
        model_provider: builds one chunk. Under V it is called twice on every rank; on rank 0 one call has pre_process set and
            the other post_process.
        config: TransformerConfig of the model.
        ddp_config: how gradients are accumulated and reduced. Not mutated; the chunks get a copy.
        spec: the schedule.
        weights_seed: draw each weight by this seed and its name (`named_weights`), so that every layout begins with the same
            weights; None: as megatron-core does, by rank.

    Raises:
        CompatibilityError: the installed megatron-core is not supported.
        SplitError: a weight's gradient cannot be deferred; on all ranks if it is on one.
        ConfigError: an option that does not work with the schedule or with sharded gradients.
    """
    check_megatron_core()
    if not spec.is_stock:
        turn_off(config, set())
    check_config(config, spec)
    if config.num_moe_experts is not None:
        define_missing_te_gemm()
    if not spec.is_stock:
        defer_to_w(config)  # not before: the config demands MoE overlap with it
    remembering = nullcontext() if weights_seed is None else remember_init_methods(config)
    with fusion_without_apex(config) as models, remembering:
        models += [_build(model_provider, spec, chunk) for chunk in range(spec.num_chunks)]
    if weights_seed is not None:
        draw_by_name(models, seed=weights_seed)
    device = torch.cuda.current_device()
    models = [model.to(device) for model in models]
    if config.fp16 or config.bf16:
        models = [StageFloat16Module(config, model) for model in models]
    tie_chunks(models)
    store = None
    if not spec.is_stock:
        store = make_store(config, ddp_config, torch.device(device))
        with refusing_together():
            for model in models:
                split_weight_gradients(model, store)
        ddp_config = dataclasses.replace(ddp_config, delay_wgrad_compute=True)
    chunks = wrap_chunks(models, config=config, ddp_config=ddp_config, is_stock=spec.is_stock)
    config.finalize_model_grads_func = FinalizeGradients(spec.placement)
    if ddp_config.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return ModelChunks(chunks, store)


def _build(model_provider: ModelProvider, spec: ScheduleSpec, chunk: int) -> nn.Module:
    placement = spec.placement
    stage = placement.rank_to_stages[parallel_state.get_pipeline_model_parallel_rank()][chunk]
    vp_stage = chunk if spec.num_chunks > 1 else None
    model = model_provider(stage == 0, stage == placement.num_stages - 1, vp_stage)
    release_unused_head(model)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


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


OVERLAP_MOE = "overlap_moe_expert_parallel_comm"
"""Option of megatron-core in whose place `zero_bubble_overlap_moe` is turned on."""

_TURNED_OFF = {
    "defer_embedding_wgrad_compute": "W defers the head's weight gradient already",
    "overlap_dispatch_backward_with_experts_wgrad": "W computes the experts' weight gradients",
    OVERLAP_MOE: "--zero-bubble-overlap-moe, which takes its place, pairs passes of this schedule",
    "ep_overlap_early_attn_memory_release": "passes are paired otherwise",
}
"""Options of megatron-core's configuration that a split of B and W makes superfluous or cannot serve, and what that costs."""


def turn_off(config: Any, known: set[str]) -> None:
    """Turn off options that only change when something is computed, before a model is built, with one line on rank 0.

    Args:
        config: TransformerConfig of the model, before megatron-core's checks of these options or after them.
        known: those that a line has named; they are added. A loop may make a config for each microbatch.
    """
    found = [name for name in _TURNED_OFF if getattr(config, name, False)]
    for name in found:
        setattr(config, name, False)
    new = [f"{name} ({_TURNED_OFF[name]})" for name in found if name not in known]
    known.update(found)
    if new and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        logger.warning("turned off for the schedule: %s", "; ".join(new))


def check_config(config: Any, spec: ScheduleSpec, *, knows_lengths: bool = False) -> None:
    """Check that every option of the model works with the schedule.

    Args:
        config: TransformerConfig of the model.
        spec: the schedule.
        knows_lengths: whether the schedule gets the lengths of unequal microbatches (`UnequalOptions`).

    Raises:
        ConfigError: an option that the B/W split or the executor does not support.
    """
    if spec.is_stock:
        return
    for name, why in _refused(config):
        if name == "variable_seq_lengths" and knows_lengths:
            continue
        raise ConfigError(f"{name} does not go with schedule {spec.name!r}: {why}. Turn it off or use the stock schedule")
    if spec.num_slices > 1:
        check_sliced_config(config, name=spec.name)


_REFUSED = {
    "hybrid_context_parallel": "it brings a schedule of its own",
    "moe_ncclep_zero_copy": "the gradients that W reads would lie in a buffer that all layers share",
    "moe_paged_stash": "it restores the inputs of experts before B, into buffers of full capacity, and W alone reads them: from "
    "B to W they would take the memory that it saves from F to B (ADR 67)",
    "fine_grained_activation_offloading": "it brings microbatches back in the order of megatron-core's 1F1B or interleaved "
    "chunks, and ends its iteration inside of those schedules",
    "cpu_offloading": "it hooks into the backward pass that is split here",
    "num_microbatches_with_partial_activation_checkpoints": "it counts 1F1B's warmup microbatches",
    "variable_seq_lengths": f"ranks have to know the lengths before an iteration begins: {GIVE_LENGTHS}, or pad to the sequence "
    "length",
    "enable_autocast": "B and W compute in the dtype of the weights, outside of autocast; use bf16 or fp16 weights",
    "moe_single_grouped_weight": "Transformer Engine's kernels for one weight of all experts need a GPU, and were not tried with "
    "deferred weight gradients",
    "moe_single_grouped_bias": "Transformer Engine's kernels for one bias of all experts need a GPU, and were not tried with "
    "deferred weight gradients",
}
"""Options of megatron-core's configuration, up to 0.19, and why none of them may be on where B and W are split."""


_REFUSED_GRAPHS = {
    "local": "megatron-core captures these graphs inside its own schedules, and lets neighboring layers share their buffers; "
    'cuda_graph_impl="transformer_engine" captures the same layers',
    "full_iteration": "in one graph of an iteration the driver, not the streams of this schedule, orders its transfers, and a "
    "receive that is posted ahead of its op spins on the SMs that another rank waits for; "
    'cuda_graph_impl="transformer_engine" captures layers',
}
"""`cuda_graph_impl` of megatron-core, and why not (ADR 53)."""


def _refused(config: Any) -> Iterator[tuple[str, str]]:
    """(name, why) of each option that is on and does not go with a split of B and W. A release without an option has it off."""
    yield from ((name, why) for name, why in _REFUSED.items() if getattr(config, name, None))
    graphs = getattr(config, "cuda_graph_impl", None)
    if graphs in _REFUSED_GRAPHS:
        yield f"cuda_graph_impl={graphs!r}", _REFUSED_GRAPHS[graphs]
    if getattr(config, "use_transformer_engine_op_fuser", False) and not makes_fused_experts_as_known():
        yield "use_transformer_engine_op_fuser", "this megatron-core makes fused experts in another way than up to 0.19"
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    first_rank = [] if layout is None or isinstance(layout, StageLayout) else layout.layout[0]
    if len(first_rank) > 1 and LayerType.mtp in first_rank[-1]:
        yield (
            "pipeline_model_parallel_layout with m (MTP layers) on the first rank",
            "two chunks of that rank have an embedding, and megatron-core's all-reduce of its gradient is called for one",
        )
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if (getattr(config, name, None) or 1) > 1:
            yield name, "weights are gathered for the backward pass and freed before W"
