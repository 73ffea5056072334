"""Weights of the linears of each half of a layer, from the flags: what FLOPs and memory are estimated from.

A layer is attention and an MLP, or attention and experts. A weight is one multiply-add per token that passes it. Biases and the
weights of normalization layers are left out. Standard library only.
"""

from __future__ import annotations

from megatron.zerobubble.training.config.settings import Settings

__all__ = ["ATTENTION", "EXPERTS", "attention_widths", "kinds_per_layer", "layer_weights", "routed_weights"]

ATTENTION, EXPERTS, _MLP = "*", "E", "-"
"""Halves of a layer, by megatron-core's letters."""


def kinds_per_layer(settings: Settings) -> tuple[str, ...]:
    """The two halves of every layer."""
    return tuple(ATTENTION + (EXPERTS if has_experts else _MLP) for has_experts in settings.moe_layer_pattern)


def layer_weights(settings: Settings, kind: str) -> int:
    """Weights that every token passes in a half of `kind`: without routed experts, of which `routed_weights` is one."""
    if kind == ATTENTION:
        return _latent_weights(settings) if settings.mla.multi_latent_attention else _attention_weights(settings)
    if kind == EXPERTS:
        return _shared_weights(settings)
    return _mlp_weights(settings, settings.model.mlp_width)


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
