"""A layer's core attention, for slices: its queries see the keys of the slices before, too.

The module's `forward` is replaced on the instance. It hands the module a view of the keys and values up to the end of the slice,
under a causal mask that is aligned to the last query and the last key. So any kernel computes it, and its backward pass returns
the gradients of all keys of the prefix, which `PrefixKeys` adds up.

A mask of the batch, cut for the slice, is what it is without slices. torch's and megatron-core's attention take it alone, so it
must hide later tokens itself. Transformer Engine's kernels take their causal mask, and some add a given one.

Shapes as in `slices.current_slice`; ``n`` heads per rank.
"""

from __future__ import annotations

import logging
import os
import weakref
from importlib import metadata
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.mcore.attention.attention_masks import hidden_lower_right, once_per_tensor
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.mcore.slices.batches import tensors_of
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, PrefixKeys, SlicePart

__all__ = ["attend_to_prefix", "is_transformer_engine"]

_log = logging.getLogger(__name__)

_FUSED_MULTIPLE = 64
"""Tokens of which cuDNN's attention takes multiples under a causal mask that is aligned to the last query and key."""
_FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
"""Packages with the flash attention that Transformer Engine uses."""


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
        self._is_torch = isinstance(attention, TorchDotProductAttention)
        self._takes_mask_only = isinstance(attention, DotProductAttention)
        self._is_engine = is_transformer_engine(attention)
        self._wants_multiples = self._is_engine and _wants_multiples(attention)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        attention, part = self._attention(), self._slices.part
        assert attention is not None
        forward = type(attention).forward
        if part is None:
            return forward(attention, query, key, value, attention_mask, **others)
        _check(part, query, key, attention_mask, others, adds_mask=self._is_engine)
        if self._wants_multiples:
            self._warn(part, attention)
        if attention_mask is not None and not self._is_engine:
            _check_causal(self._slices, part)
        query = _apart(query)
        kept = self._slices.keys(attention, key, value)
        keys, values = _Prefix.apply(key, value, kept, part)
        if attention_mask is None and self._takes_mask_only:
            attention_mask = hidden_lower_right(part.length, part.end, query.device)
        if attention_mask is None or self._is_engine:
            others["attn_mask_type"] = AttnMaskType.causal_bottom_right
        elif self._is_torch:  # else it wants a causal mask to have as many keys as queries
            others["attn_mask_type"] = AttnMaskType.no_mask
        return forward(attention, query, keys, values, attention_mask, **others)

    def _warn(self, part: SlicePart, attention: Any) -> None:
        """Log, once for all layers, that the kernel is another one than without slices."""
        why = _falls_back(part, attention.attention_dropout if attention.training else 0.0)
        if why is not None and self._slices.is_first("unfused attention"):
            _log.warning(
                "slices: Transformer Engine's attention falls back to its unfused kernel, which keeps all scores: %s, and "
                "without flash-attn cuDNN takes slices only without dropout and with lengths that are multiples of %d; install "
                "flash-attn, or change that",
                why,
                _FUSED_MULTIPLE,
            )


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


def _check(
    part: SlicePart, query: Tensor, key: Tensor, attention_mask: Tensor | None, others: dict[str, Any], *, adds_mask: bool
) -> None:
    if others.get("packed_seq_params") is not None:
        raise ConfigError(
            "slices do not go with packed sequences, whose attention begins anew inside of a slice: leave one of the two out"
        )
    if query.size(0) != part.length or key.size(0) != part.length:
        raise ExecutionError(
            f"slice {part.index} has {part.length} of {part.whole} tokens and an attention got {query.size(0)} queries and "
            f"{key.size(0)} keys: forward_step_func must run the part of the batch that its iterator returns"
        )
    rows = (part.length, 1) if adds_mask else (part.length,)
    if attention_mask is not None and attention_mask.shape[-2:] not in [(each, part.end) for each in rows]:
        raise ConfigError(
            f"slice {part.index}: the attention mask has shape {tuple(attention_mask.shape)}, and the queries of the slice see "
            f"keys 0 to {part.end - 1}: give a mask [b or 1, 1, {part.length}, {part.end}], or None for a causal one"
        )


def _check_causal(slices: CurrentSlice, part: SlicePart) -> None:
    """Raise ConfigError if a query sees later keys by a mask of the batch: those behind the slice have not been computed."""
    for path, mask in tensors_of(slices.whole_batch):
        if mask.dtype is torch.bool and mask.dim() >= 2 and mask.shape[-1] == part.whole and mask.shape[-2] in (1, part.whole):
            is_mask = path[-1:] == ("attention_mask",) or mask.dim() == 4
            if is_mask and not once_per_tensor(mask, "is causal", _is_causal):
                raise ConfigError(
                    f"slices: by the mask {''.join(f'[{key!r}]' for key in path)} of the batch tokens see later ones, and a "
                    "slice sees only what is before it: give a causal mask, True where a query must not see a key, or None"
                )


def _is_causal(hidden: Tensor) -> bool:
    """Whether a mask [..., S or 1, S] hides all later keys from every query."""
    whole = hidden.size(-1)
    rows = hidden.expand(*hidden.shape[:-2], whole, whole).split(1024, dim=-2)  # a mask is large
    return not any(bool((~row[..., 1024 * number :]).triu(1).any()) for number, row in enumerate(rows))


def _wants_multiples(attention: Any) -> bool:
    """Whether an attention of Transformer Engine runs cuDNN's kernel without slices, and has no other one for them."""
    config = getattr(attention, "config", None)
    if config is None or config.params_dtype not in (torch.float16, torch.bfloat16):
        return False
    return config.attention_backend in (AttnBackend.auto, AttnBackend.fused) and not _has_flash(attention)


def _has_flash(attention: Any) -> bool:
    """Whether Transformer Engine's attention may run flash-attn, which takes slices of any length and dropout."""
    if attention.config.attention_backend is AttnBackend.fused or os.environ.get("NVTE_FLASH_ATTN") == "0":
        return False
    return any(_is_installed(name) for name in _FLASH)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _falls_back(part: SlicePart, dropout: float) -> str | None:
    """Why cuDNN's attention does not take a slice; None: it does."""
    if dropout:
        return f"attention_dropout is {dropout:g}"
    if part.length % _FUSED_MULTIPLE or part.end % _FUSED_MULTIPLE:
        return f"a slice has tokens {part.offset} to {part.end - 1}"
    return None
