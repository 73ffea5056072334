"""Recipes of Megatron-Bridge, shrunk in sizes only: layers, widths, experts, heads, vocabulary, ranks and lengths.

The sizes of their models come from Hugging Face's hub, which tests do not ask: a recipe here has them, with what else is not the
default of the class in transformers. What a CPU cannot serve is off, and named, in `not_served`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RECIPES", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """One recipe, and how it is shrunk."""

    function: str
    """ "module:function", in `megatron.bridge`."""
    hub: Mapping[str, Any]
    """The model on the hub: `kind`, a class of transformers, and its fields."""
    sizes: Mapping[str, Any]
    """By dotted names of the recipe's configuration, for two stages and one chunk per rank, on four ranks."""
    chunks: Mapping[str, Any] | None = field(default_factory=lambda: dict(_TWO_CHUNKS))
    """What changes with two chunks per rank; None where Bridge refuses them."""
    not_served: Mapping[str, Any] = field(default_factory=dict)
    """What a CPU cannot serve, and what stands there instead."""
    graphs: bool = False
    """Whether it captures CUDA graphs."""
    drawn: Mapping[str, Any] = field(default_factory=dict)
    """Turns off what all chunks of a rank draw from one generator, where stock and ZBV are compared: their orders of F differ."""

    @property
    def changes(self) -> dict[str, Any]:
        """All of them with one chunk per rank."""
        return {**_SMALL, **self.sizes, **self.not_served}


_SMALL = {
    "tokenizer.tokenizer_type": "NullTokenizer",
    "tokenizer.tokenizer_model": None,
    "tokenizer.vocab_size": 90,
    "tokenizer.use_tokenizer_vocab_size": False,
    "model.vocab_size": 96,
    "model.make_vocab_size_divisible_by": 8,
    "model.gradient_accumulation_fusion": True,
    "model.pipeline_model_parallel_size": 2,
    "train.train_iters": 10,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 8,
    "validation.eval_iters": 0,
}
_NO_TRITON = {"model.cross_entropy_fusion_impl": "native"}
"""Transformer Engine's cross-entropy is a kernel of triton's."""
_NO_EXPERT_KERNELS = {"model.moe_permute_fusion": False, "model.moe_token_dispatcher_type": "alltoall", **_NO_TRITON}
"""So is its permutation; DeepEP and HybridEP are libraries for GPUs."""
_DENSE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,  # embedding and loss count as a layer each
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_MLA = {
    "kind": "DeepseekV3Config",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
}

_LLAMA = "recipes.llama.h100.llama3:llama31_405b_pretrain_256gpu_h100_bf16_config"
_LLAMA_HUB = {
    **_DENSE,
    "kind": "LlamaConfig",
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_ONE_CHUNK = {"model.virtual_pipeline_model_parallel_size": None}
_TWO_CHUNKS = {"model.virtual_pipeline_model_parallel_size": 2}


def _layout(last: list[str]) -> dict[str, Any]:
    """Seven layers in two stages, behind which `last` stands."""
    return {"model.pipeline_model_parallel_layout": [["embedding"] + ["decoder"] * 4, ["decoder"] * 3 + last]}


def _chunks(last: list[str]) -> dict[str, Any]:
    """The same layers in four."""
    stages = [["embedding"] + ["decoder"] * 2, ["decoder"] * 2, ["decoder"] * 2, ["decoder", *last]]
    return {"model.virtual_pipeline_model_parallel_size": 2, "model.pipeline_model_parallel_layout": stages}


RECIPES = {
    "llama-3.1-405b": Recipe(
        _LLAMA,
        hub=_LLAMA_HUB,
        sizes={"model.tensor_model_parallel_size": 2, "model.context_parallel_size": 1, **_ONE_CHUNK},
        not_served={
            "model.tp_comm_bulk_dgrad": False,  # Userbuffers beside a GEMM that they do not belong to
            "model.tp_comm_bulk_wgrad": False,
            **_NO_TRITON,
        },
    ),
    "llama-3.1-405b-cp": Recipe(
        _LLAMA,
        hub=_LLAMA_HUB,
        sizes={
            "model.tensor_model_parallel_size": 1,
            "model.sequence_parallel": False,
            "model.context_parallel_size": 2,
            "comm_overlap.overlap_grad_reduce": True,  # in `ddp`, too; Bridge turns both off there without data parallelism
            "comm_overlap.overlap_param_gather": True,
            **_ONE_CHUNK,
        },
        chunks={**_TWO_CHUNKS, "comm_overlap.overlap_param_gather_with_optimizer_step": True},
        not_served=_NO_TRITON,
    ),
    "deepseek-v3": Recipe(
        "recipes.deepseek.h100.deepseek_v3:deepseek_v3_pretrain_1024gpu_h100_bf16_config",
        hub={**_MLA, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 1},
        sizes={
            "model.tensor_model_parallel_size": 1,
            "model.sequence_parallel": False,
            "model.expert_model_parallel_size": 2,
            **_layout(["mtp", "loss"]),
        },
        chunks=_chunks(["mtp", "loss"]),
        not_served=_NO_EXPERT_KERNELS | {"model.moe_shared_expert_overlap": True},  # HybridEP turns it off
    ),
    "qwen3-235b": Recipe(
        "perf_recipes.qwen.gb200.qwen3_moe:qwen3_235b_a22b_pretrain_64gpu_gb200_bf16_config",
        hub={
            **_DENSE,
            "kind": "Qwen3MoeConfig",
            "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rope_theta": 1000000.0,
        },
        sizes={"model.expert_model_parallel_size": 2},
        not_served={
            **_NO_EXPERT_KERNELS,
            "model.moe_router_fusion": False,
        },
        graphs=True,
        drawn={"model.moe_router_force_load_balancing": False},
    ),
    "kimi-k2": Recipe(
        "recipes.kimi.h100.kimi_k2:kimi_k2_pretrain_512gpu_h100_bf16_config",
        hub={
            **_MLA,
            "architectures": ["KimiK2ForCausalLM"],
            "scoring_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "routed_scaling_factor": 2.827,
        },
        sizes={"model.tensor_model_parallel_size": 2, "model.expert_model_parallel_size": 2, **_layout(["loss"])},
        chunks=_chunks(["loss"]),
        not_served=_NO_EXPERT_KERNELS,
    ),
    "nemotron-3-super": Recipe(
        "recipes.nemotronh.h100.nemotron_3_super:_nemotron_3_super_pretrain_64gpu_h100_bf16_config",
        hub={
            "kind": "NemotronHConfig",
            "architectures": ["NemotronHForCausalLM"],
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "layers_block_type": ["mamba", "moe", "attention", "moe"] * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "moe_latent_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 1,
        },
        sizes={"model.expert_model_parallel_size": 2},
        chunks=None,
        not_served={**_NO_EXPERT_KERNELS, "model.moe_flex_dispatcher_backend": None},
    ),
}
