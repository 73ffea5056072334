"""Layer specs of a GPT stage: megatron-core's own layers, or Transformer Engine's.

The local layers use torch's attention (`mcore.attention.torch_attention`), unless `config.attention_backend` is `local`.
The local layers use `LocalNorm`: torch's LayerNorm or RMSNorm, which also supports what megatron-core's wrapper does not
(sequence parallelism needs the normalization parameters marked, so that their gradients are all-reduced over the tensor-parallel
ranks).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention

__all__ = ["LocalNorm", "local_layer", "mtp_layers", "stage_layers"]


class LocalNorm:
    """Builds torch's LayerNorm or RMSNorm, by `config.normalization`. A factory: instances are torch modules."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        norm_class = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def stage_layers(config: TransformerConfig, *, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec of the transformer layers of one stage.

    Args:
        config: the model. Its pipeline layout selects the layers of the stage; `moe_layer_freq`, a list with one entry per layer,
            selects those with experts.
        vp_stage: index of the stage among the rank's model chunks; None if the rank has one.
    """
    if config.transformer_impl == "transformer_engine":
        if config.num_moe_experts is not None:
            return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        return get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=config.multi_latent_attention
        )
    first = get_transformer_layer_offset(config, vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage))
    has_experts = [config.num_moe_experts is not None and bool(config.moe_layer_freq[number]) for number in numbers]
    layers = {kind: local_layer(config, has_experts=kind) for kind in set(has_experts)}
    return TransformerBlockSubmodules(layer_specs=[layers[kind] for kind in has_experts], layer_norm=LocalNorm)


def mtp_layers(config: TransformerConfig, *, vp_stage: int | None) -> MultiTokenPredictionBlockSubmodules | None:
    """The spec of the multi-token prediction (MTP) layers of one stage. Each contains a layer like the model's last one.

    Args:
        config: the model; `mtp_num_layers` is the number of MTP layers.
        vp_stage: index of the stage among the rank's model chunks; None if the rank has one.

    Returns:
        The spec; None on a stage that does not compute the loss, or without MTP layers.
    """
    count = get_mtp_num_layers_to_build(config, vp_stage=vp_stage) if config.mtp_num_layers else 0
    if count == 0:
        return None
    has_experts = config.num_moe_experts is not None and bool(config.moe_layer_freq[-1])
    if config.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if has_experts else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
        head = get_mtp_layer_spec(layer, use_transformer_engine=True)
    else:
        head = get_mtp_layer_spec(local_layer(config, has_experts=has_experts), use_transformer_engine=False)
        head.submodules.enorm = head.submodules.hnorm = head.submodules.layer_norm = LocalNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[head] * count)


def local_layer(config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    """The spec of a transformer layer of megatron-core's own modules, with `LocalNorm` and torch's attention.

    Args:
        config: the model.
        has_experts: whether the layer has experts in place of the MLP.

    Raises:
        ConfigError: multi-latent attention, which megatron-core's own modules do not train.
    """
    if config.multi_latent_attention:
        raise ConfigError(
            "multi-latent attention needs Transformer Engine's layers, because megatron-core's own attention does not take its "
            "head sizes: choose --transformer-impl transformer_engine"
        )
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = LocalNorm
    layer.submodules.pre_mlp_layernorm = LocalNorm
    if has_experts:  # the default map also renames a dense MLP's norm to Transformer Engine's name; MoE layers keep theirs
        layer.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    attention = layer.submodules.self_attention.submodules
    is_own = config.attention_backend is AttnBackend.local
    attention.core_attention = DotProductAttention if is_own else TorchDotProductAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalNorm
    return layer
