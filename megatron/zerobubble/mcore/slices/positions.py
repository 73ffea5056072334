"""Positions of tokens, for slices: those of the slice's first token on, in rotary and in learned position embeddings."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from megatron.zerobubble.mcore.slices.batches import has_positions
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart

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
    """Of an embedding with learned positions: moves position ids that the forward step has counted from 0, not read.

    Which of the two a loop does is found out once, at the first slice that is not the first of its microbatch. Of
    tensor-parallel ranks, which come here together, the first one may be the only one that reads batches; it decides.
    """

    _are_read: bool | None = None

    def __call__(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        part = self._slices.part
        if part is not None and part.offset:
            if self._are_read is None:
                self._are_read = self._finds_them_in_batch(part, position_ids.device)
            if not self._are_read:
                position_ids = position_ids + part.offset
        return self._forward(input_ids, position_ids, *args, **kwargs)

    def _finds_them_in_batch(self, part: SlicePart, device: torch.device) -> bool:
        found = torch.tensor([has_positions(self._slices.batch, part)], dtype=torch.int, device=device)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            first = parallel_state.get_tensor_model_parallel_src_rank()
            dist.broadcast(found, first, group=parallel_state.get_tensor_model_parallel_group())
        return bool(found.item())
