"""Weights of the linears of each kind of layer, from the flags: what FLOPs and memory are estimated from.

A kind is a letter of --hybrid-layer-pattern; a transformer layer of a GPT is two of them. A weight is one multiply-add per token
that passes it. Biases and the weights of normalization layers are left out. Standard library only.
"""

from __future__ import annotations

from megatron.zerobubble.plan.partition.hybrid_pattern import EXPERTS, MAMBA, HybridPattern
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["MAMBA_STATE", "attention_widths", "kinds_per_layer", "layer_weights", "mamba_width", "routed_weights"]

MAMBA_STATE, _MAMBA_HEAD, _MAMBA_GROUPS, _MAMBA_EXPAND, _MAMBA_CONV = 128, 64, 8, 2, 4
"""megatron-core's defaults, which no flag of ours changes: states per channel N, channels per head, groups G, e = expand * h,
width of the convolution c."""


def kinds_per_layer(settings: Settings) -> tuple[str, ...]:
    """Per layer, as stages count them, its kinds: two letters for a transformer layer of a GPT, one in a hybrid pattern."""
    pattern = settings.model.hybrid_layer_pattern
    if pattern is not None:
        return tuple(HybridPattern.parse(pattern).layers)
    return tuple("*" + (EXPERTS if has_experts else "-") for has_experts in settings.moe_layer_pattern)


def layer_weights(settings: Settings, kind: str) -> int:
    """Weights that every token passes in a layer of `kind`: without routed experts, of which `routed_weights` is one."""
    if kind == "*":
        return _latent_weights(settings) if settings.mla.multi_latent_attention else _attention_weights(settings)
    if kind == EXPERTS:
        return _shared_weights(settings)
    return _mamba_weights(settings) if kind == MAMBA else _mlp_weights(settings, settings.model.mlp_width)


def routed_weights(settings: Settings) -> int:
    """Weights of one routed expert; a token passes --moe-router-topk of them."""
    return _mlp_weights(settings, settings.moe.moe_ffn_hidden_size or settings.model.mlp_width)


def attention_widths(settings: Settings) -> tuple[int, int, int]:
    """Widths over all heads of queries, of keys, and of values as attention returns them (one per query head)."""
    model, mla = settings.model, settings.mla
    heads = model.num_attention_heads
    if mla.multi_latent_attention:
        query = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        return query, query, heads * mla.v_head_dim
    groups = model.num_query_groups if model.group_query_attention else heads
    return heads * model.head_width, groups * model.head_width, heads * model.head_width


def mamba_width(settings: Settings) -> int:
    """Channels of a Mamba layer."""
    return _MAMBA_EXPAND * settings.model.hidden_size


def _attention_weights(settings: Settings) -> int:
    queries, keys, values = attention_widths(settings)
    return settings.model.hidden_size * (queries + 2 * keys + values)


def _latent_weights(settings: Settings) -> int:
    hidden, heads, mla = settings.model.hidden_size, settings.model.num_attention_heads, settings.mla
    queries, _, values = attention_widths(settings)
    from_tokens = hidden * queries if mla.q_lora_rank is None else (hidden + queries) * mla.q_lora_rank
    down = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    return from_tokens + down + mla.kv_lora_rank * (heads * mla.qk_head_dim + values) + values * hidden


def _mlp_weights(settings: Settings, width: int) -> int:
    return settings.model.hidden_size * width * (3 if settings.model.swiglu else 2)


def _shared_weights(settings: Settings) -> int:
    """Shared expert, its gate, and the router."""
    moe, hidden = settings.moe, settings.model.hidden_size
    shared = moe.moe_shared_expert_intermediate_size or 0
    gate = hidden if shared and moe.moe_shared_expert_gate else 0
    return _mlp_weights(settings, shared) + gate + hidden * (moe.num_experts or 0)


def _mamba_weights(settings: Settings) -> int:
    hidden, inner, states = settings.model.hidden_size, mamba_width(settings), _MAMBA_GROUPS * MAMBA_STATE
    projections = hidden * (2 * inner + 2 * states + inner // _MAMBA_HEAD) + inner * hidden
    return projections + _MAMBA_CONV * (inner + 2 * states)
