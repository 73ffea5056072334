"""Which keys a query sees, in the form that torch's attention takes.

megatron-core's masks are boolean and True where a query must **not** see a key. torch turns a boolean mask into the numbers that
it adds to the scores, in every layer, and keeps them for the backward pass. So they are made here, once per mask: the layers of a
stage share one mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron.zerobubble.errors import ConfigError

__all__ = ["hidden_lower_right", "mask_options", "once_per_tensor"]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


def mask_options(mask_type: AttnMaskType, query: Tensor, key: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
    """The keywords of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        mask_type: which keys a query sees, beside what a mask says.
        query: [b, n, queries, d].
        key: [b, g, keys, d].
        attention_mask: True where a query must not see a key, broadcast to [b, n, queries, keys].
    """
    num_queries, num_keys = query.size(2), key.size(2)
    masks = []
    if attention_mask is not None:
        if attention_mask.dtype is not torch.bool:
            raise ConfigError(
                f"an attention mask of {attention_mask.dtype} is not supported: give a boolean one, True where a query must not "
                "see a key"
            )
        masks.append(once_per_tensor(attention_mask, query.dtype, lambda mask: _additive(mask, query.dtype)))
    if _is_causal(mask_type, num_queries, num_keys, has_mask=attention_mask is not None):
        if not masks and num_queries == num_keys:
            return {"is_causal": True}
        if not masks and query.is_cuda:
            return {"attn_mask": causal_lower_right(num_queries, num_keys)}  # no entries
        masks.append(_lower_right(num_queries, num_keys, query.dtype, query.device))
    return {"attn_mask": sum(masks[1:], start=masks[0])} if masks else {}


def _is_causal(mask_type: AttnMaskType, num_queries: int, num_keys: int, *, has_mask: bool) -> bool:
    """Whether a query sees no key after its own position, beside what a mask says. A single query sees all keys."""
    if num_queries == 1 or mask_type not in _CAUSAL:
        return False
    if mask_type is AttnMaskType.causal_bottom_right:
        return True
    if num_queries != num_keys:
        raise ConfigError(
            f"a {mask_type.name} mask needs as many keys as queries, not {num_keys} and {num_queries}: use causal_bottom_right, "
            "or give a mask"
        )
    return not has_mask or mask_type is AttnMaskType.padding_causal


def once_per_tensor(tensor: Tensor, key: object, make: Callable[[Tensor], Any]) -> Any:
    """`make(tensor)`, made again only for another `key` or after the tensor was written to. It lives as long as the tensor."""
    state = (key, tensor._version)
    made = getattr(tensor, "_zerobubble_made", None)
    if made is None or made[0] != state:
        made = (state, make(tensor))
        tensor._zerobubble_made = made  # type: ignore[attr-defined]
    return made[1]


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, and -inf where `hidden` is True."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def hidden_lower_right(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """The causal mask, [1, 1, queries, keys], True where a query must not see a key. The last query is at the last key."""
    return _lower_right(num_queries, num_keys, torch.bool, device)[None, None]


def _lower_right(num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The causal mask of queries that are the last of a sequence, [queries, keys]: to add, or for bool as `hidden_lower_right`.

    It is a part of a mask that is shared by sequences, and numbers of queries, of similar lengths: with ``|`` for its middle,

        keys that all queries see  |  own keys
    """
    own, before = _power_of_two(num_queries), _power_of_two(num_keys - num_queries)
    begin = before - (num_keys - num_queries)
    return _shared_lower_right(own, before, dtype, device)[:num_queries, begin : begin + num_keys]


@functools.lru_cache(maxsize=16)
def _shared_lower_right(own: int, before: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The causal mask of `own` queries behind `before` keys, [own, before + own]."""
    hidden = torch.ones(own, before + own, dtype=torch.bool, device=device).triu(before + 1)
    return hidden if dtype is torch.bool else _additive(hidden, dtype)


def _power_of_two(number: int) -> int:
    """The smallest one that is at least `number`; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0
