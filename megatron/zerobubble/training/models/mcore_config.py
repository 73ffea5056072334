"""Builds megatron-core's configuration objects from `Settings`.

Names that differ in megatron-core, and choices that depend on the device, are translated here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron.zerobubble.training.config.model import ModelConfig
from megatron.zerobubble.training.config.settings import Settings

__all__ = [
    "ddp_config",
    "optimizer_config",
    "parameter_dtype",
    "scheduler",
    "transformer_config",
]


def parameter_dtype(settings: Settings) -> torch.dtype:
    """The dtype of parameters and of the activations and gradients sent between stages."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision.name]


def transformer_config(settings: Settings, *, on_gpu: bool, layout: Any | None) -> TransformerConfig:
    """megatron-core's configuration of the model and its parallelism.

    Args:
        settings: checked flags.
        on_gpu: whether to use kernels that exist only on GPUs (fusions, compiled activations).
        layout: the layers of each stage; None lets megatron-core divide them evenly.
    """
    model, dtype = settings.model, parameter_dtype(settings)
    overlaps = settings.virtual_pipeline_size is not None and settings.zero_bubble.schedule == "stock"
    config_class = MLATransformerConfig if settings.mla.multi_latent_attention else TransformerConfig
    others = {
        "recompute_granularity": model.recomputed,
        "recompute_modules": list(model.recompute_modules) or None,
        "num_query_groups": model.num_query_groups if model.group_query_attention else None,
        "attention_backend": AttnBackend[model.attention_backend],
        "persist_layer_norm": False,
        "cuda_graph_scope": [],
        "ffn_hidden_size": model.mlp_width,
        "activation_func": torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        "gated_linear_unit": model.swiglu,
        "virtual_pipeline_model_parallel_size": settings.virtual_pipeline_size,
        "pipeline_model_parallel_layout": layout,
        "cp_comm_type": "all_gather" if model.transformer_impl == "local" else "p2p",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "overlap_p2p_comm": overlaps,
        "batch_p2p_comm": not overlaps,
        "deallocate_pipeline_outputs": on_gpu or not overlaps,
    }
    return config_class(
        **(_same_named(config_class, model, settings.parallel, settings.precision, settings.optim) | others)
        | _latent_attention(settings)
        | _experts(settings)
        | settings.fp8.model_options()
        | _kernels(model, on_gpu=on_gpu, is_latent=settings.mla.multi_latent_attention)
    )


def _same_named(target: Any, *groups: Any) -> dict[str, Any]:
    """The fields of the groups of flags that `target`, a configuration class of megatron-core, has by the same name."""
    names = {field.name for field in dataclasses.fields(target)}
    fields = [(group, field.name) for group in groups for field in dataclasses.fields(group) if field.name in names]
    return {name: getattr(group, name) for group, name in fields}


def _latent_attention(settings: Settings) -> dict[str, Any]:
    return {**dataclasses.asdict(settings.mla), "rope_type": "rope"} if settings.mla.multi_latent_attention else {}


def _experts(settings: Settings) -> dict[str, Any]:
    moe = settings.moe
    if moe.num_experts is None:
        return {}
    kinds, weights = list(moe.moe_router_load_balancing_type), list(moe.moe_aux_loss_coeff)
    return _same_named(TransformerConfig, moe) | {
        "num_moe_experts": moe.num_experts,
        "expert_tensor_parallel_size": settings.expert_tensor_parallel_size,
        "moe_layer_freq": list(settings.moe_layer_pattern),
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size or settings.model.mlp_width,
        # megatron-core takes a scalar for one kind and a list for several.
        "moe_router_load_balancing_type": kinds[0] if len(kinds) == 1 else kinds,
        "moe_aux_loss_coeff": weights[0] if len(weights) == 1 else weights,
    }


def _kernels(model: ModelConfig, *, on_gpu: bool, is_latent: bool = False) -> dict[str, Any]:
    """Flags of fused kernels, set where they exist. On the CPU plain torch ops run: compiling takes longer than it saves.

    Transformer Engine adds to ``main_grad`` without apex (`mcore.model.transformer_engine`).
    """
    activation = model.swiglu or (model.bias_gelu_fusion and model.add_bias_linear)
    is_engine = model.transformer_impl == "transformer_engine"
    softmax = all(map(_is_installed, ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda")))
    return {
        "bias_activation_fusion": on_gpu and activation,
        "bias_dropout_fusion": on_gpu and model.bias_dropout_fusion,
        "masked_softmax_fusion": on_gpu and softmax,
        "apply_rope_fusion": on_gpu and is_engine and model.position_embedding_type == "rope" and not is_latent,
        "gradient_accumulation_fusion": on_gpu
        and model.gradient_accumulation_fusion
        and (is_engine or _is_installed("fused_weight_gradient_mlp_cuda")),
    }


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def ddp_config(settings: Settings) -> DistributedDataParallelConfig:
    """How gradients are accumulated, and reduced over the data-parallel replicas."""
    return DistributedDataParallelConfig(
        **_same_named(DistributedDataParallelConfig, settings.parallel),
        grad_reduce_in_fp32=settings.precision.reduce_grads_in_fp32,
    )


def optimizer_config(settings: Settings) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer, gradient clipping and loss scaling."""
    same = _same_named(OptimizerConfig, settings.optim, settings.precision, settings.parallel)
    return OptimizerConfig(**same, params_dtype=parameter_dtype(settings))


def scheduler(settings: Settings, optimizer: Any) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay, in samples, as in Megatron-LM."""
    optim = settings.optim
    return OptimizerParamScheduler(
        optimizer,
        init_lr=optim.lr_warmup_init,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=settings.lr_warmup_samples,
        lr_decay_steps=settings.lr_decay_samples,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=settings.train_samples,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=optim.override_opt_param_scheduler,
    )
