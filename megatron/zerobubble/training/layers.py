"""The layers a GPT stage is made of: megatron-core's own, or Transformer Engine's.

The local layers get our `LocalNorm`: torch's LayerNorm or RMSNorm, which also works where megatron-core's wrapper refuses
(sequence parallelism needs the norm's parameters marked, so that their gradients are summed over the tensor-parallel ranks).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

__all__ = ["LocalNorm", "stage_layers"]


class LocalNorm:
    """Builds torch's LayerNorm or RMSNorm, as the configuration says. A factory: instances are torch modules."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        norm_class = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def stage_layers(config: TransformerConfig, *, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers of one stage.

    Args:
        config: the model; its pipeline layout says how many layers the stage has.
        vp_stage: which of the rank's chunks; None if it has one.
    """
    if config.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer.submodules.input_layernorm = LocalNorm
    layer.submodules.pre_mlp_layernorm = LocalNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = LocalNorm
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=LocalNorm)
