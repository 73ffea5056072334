"""A layer's core attention, for slices: its queries see the keys of the slices before, too.

The module's `forward` is replaced on the instance. It hands the module a view of the keys and values up to the end of the slice,
under a causal mask that is aligned to the last query and the last key. So any kernel computes it, and its backward pass returns
the gradients of all keys of the prefix, which `PrefixKeys` adds up.

Shapes as in `slices.current_slice`; ``n`` heads per rank.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.mcore.attention.attention_masks import hidden_lower_right
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, PrefixKeys, SlicePart

__all__ = ["attend_to_prefix", "is_transformer_engine"]


def attend_to_prefix(attention: nn.Module, slices: CurrentSlice) -> None:
    """Let a core attention see the slices before the current one. Undone by deleting its attribute `forward`.

    Args:
        attention: `TorchDotProductAttention`, megatron-core's `DotProductAttention`, or Transformer Engine's.
        slices: of the rank.
    """
    attention.forward = _PrefixForward(attention, slices)


def is_transformer_engine(module: object) -> bool:
    """Whether a module is one of Transformer Engine, or a wrapper of megatron-core around one."""
    return any(each.__module__.partition(".")[0] == "transformer_engine" for each in type(module).__mro__)


class _PrefixForward:
    """The `forward` of a core attention. Arguments and result are the module's own."""

    def __init__(self, attention: nn.Module, slices: CurrentSlice) -> None:
        self._attention = weakref.ref(attention)
        self._slices = slices
        self._takes_mask_only = isinstance(attention, DotProductAttention)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        attention, part = self._attention(), self._slices.part
        assert attention is not None
        forward = type(attention).forward
        if part is None:
            return forward(attention, query, key, value, attention_mask, **others)
        _check(part, query, key, attention_mask, others)
        query = _apart(query)
        kept = self._slices.keys(attention, key, value)
        keys, values = _Prefix.apply(key, value, kept, part)
        if self._takes_mask_only:
            attention_mask = hidden_lower_right(part.length, part.end, query.device)
        else:
            others["attn_mask_type"] = AttnMaskType.causal_bottom_right
        return forward(attention, query, keys, values, attention_mask, **others)


def _apart(query: Tensor) -> Tensor:
    """The queries, as a copy where they are part of a larger tensor.

    Attention keeps them for the backward pass, and a view keeps all of its storage: without rotary positions, which make new
    queries, the whole output of the QKV projection, whose keys and values are in the buffer already.
    """
    return query.clone() if query.requires_grad and query.untyped_storage().nbytes() > query.nbytes else query


class _Prefix(torch.autograd.Function):
    """The keys and values up to the end of a slice, from its own; in B, the complete gradients of its own."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, kept: PrefixKeys, part: SlicePart) -> tuple[Tensor, Tensor]:
        ctx.kept, ctx.part = kept, part
        return kept.append(part, key, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        key, value = ctx.kept.add_gradients(ctx.part, *gradients)
        return key, value, None, None


def _check(part: SlicePart, query: Tensor, key: Tensor, attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    if others.get("packed_seq_params") is not None:
        raise ConfigError(
            "slices do not go with packed sequences, whose attention begins anew inside of a slice: leave one of the two out"
        )
    if query.size(0) != part.length or key.size(0) != part.length:
        raise ExecutionError(
            f"slice {part.index} has {part.length} of {part.whole} tokens and an attention got {query.size(0)} queries and "
            f"{key.size(0)} keys: forward_step_func must run the part of the batch that its iterator returns"
        )
    if attention_mask is not None:
        raise ConfigError(
            f"slices do not go with an attention mask, and the model got one of shape {tuple(attention_mask.shape)}: give None, "
            "with which attention is causal, or leave out slices"
        )
