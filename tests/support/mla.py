"""The small GPT of `gpt`, with multi-latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer import MLATransformerConfig

from megatron.zerobubble.mcore.attention.latent_attention import LatentDotProductAttention
from megatron.zerobubble.training.models.layer_specs import stage_layers
from tests.support.gpt import Case, Trainer


@dataclass(frozen=True)
class MlaCase(Case):
    q_lora_rank: int | None = 24
    qk_layernorm: bool = False
    rope_type: str = "yarn"
    v_head_dim: int = 6
    """Differs from the size of a query head, 12."""
    own_attention: bool = False
    """Whether scores are computed by megatron-core's attention, in place of torch's. In the spec and not by `attention_backend`:
    megatron-core writes that into the environment of the process, once."""


class MlaTrainer(Trainer, trains=MlaCase):
    case: MlaCase

    config_type = MLATransformerConfig

    def _config_changes(self) -> dict[str, Any]:
        case = self.case
        return {
            "multi_latent_attention": True,
            "q_lora_rank": case.q_lora_rank,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": case.v_head_dim,
            "qk_layernorm": case.qk_layernorm,
            "rope_type": case.rope_type,
            "rotary_scaling_factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale_all_dim": 0.5,
        }

    def _layers(self, vp_stage: int | None) -> Any:
        layers = stage_layers(self.config, vp_stage=vp_stage)
        for layer in layers.layer_specs if self.case.own_attention else ():
            layer.submodules.self_attention.submodules.core_attention = LatentDotProductAttention
        return layers

    def _model_options(self, vp_stage: int | None) -> dict[str, Any]:
        return {"position_embedding_type": "rope"}


def own_part(whole: Any, parameter: Any) -> Any:
    """This tensor-parallel rank's part of a tensor of an undivided model; the tensor itself if the parameter is not divided."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    parts = whole.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim=parameter.partition_dim)
    return parts[parallel_state.get_tensor_model_parallel_rank()]
