"""Positions of tokens, for slices: those of the slice's first token on, in rotary and in learned position embeddings."""

from __future__ import annotations

import weakref
from typing import Any

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice

__all__ = ["count_from_slice"]


def count_from_slice(module: nn.Module, slices: CurrentSlice) -> bool:
    """Let a position embedding begin at the current slice's first token. Undone by deleting its attribute `forward`.

    Args:
        module: any module of a model.
        slices: of the rank.

    Returns:
        Whether it is one of the modules that need it.
    """
    if isinstance(module, RotaryEmbedding):
        module.forward = _Rotary(module, slices)
    elif isinstance(module, LanguageModelEmbedding) and module.add_position_embedding:
        module.forward = _Learned(module, slices)
    else:
        return False
    return True


class _Replaced:
    """The `forward` of a module, in place of its class's."""

    def __init__(self, module: nn.Module, slices: CurrentSlice) -> None:
        self._module = weakref.ref(module)
        self._slices = slices

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        return type(module).forward(module, *args, **kwargs)


class _Rotary(_Replaced):
    """Of megatron-core's `RotaryEmbedding` and its subclasses, which take an offset."""

    def __call__(self, max_seq_len: int, offset: int = 0, **others: Any) -> Any:
        part = self._slices.part
        return self._forward(max_seq_len, offset if part is None else offset + part.offset, **others)

    def cache_clear(self) -> None:
        """As the method of the `lru_cache` around the class's `forward`."""
        module: Any = self._module()
        type(module).forward.cache_clear()


class _Learned(_Replaced):
    """Of an embedding with learned positions: moves position ids that the forward step has counted from 0."""

    def __call__(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        part = self._slices.part
        if part is not None and part.offset and not self._slices.has_positions:
            position_ids = position_ids + part.offset
        return self._forward(input_ids, position_ids, *args, **kwargs)
