"""Positions of tokens, for slices: those of the slice's first token on, in rotary and in learned position embeddings.

A loop reads position ids from its batch, where they are cut with it, or counts them, in every slice from 0. Which of the two a
tensor is that a module gets is decided for each one, by its values and by what was read. Where neither or both fit, whoever
installs the schedule has to say.
"""

from __future__ import annotations

import enum
import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.slices.batches import POSITIONS, tensors_of
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart

__all__ = ["PositionIds", "count_from_slice"]

_NOT_POSITIONS = ("tokens", "input_ids", "text", "labels", "loss_mask", "attention_mask", "padding_mask")


class _Read(enum.IntEnum):
    """Whether position ids are of the batch that was read."""

    NO = 0
    MAYBE = 1
    """They have the values of a tensor of it, or are a part of one."""
    YES = 2
    """They are one of its tensors."""


class PositionIds:
    """Position ids that a model is given in a slice, as those of the whole sequence.

    Args:
        slices: of the rank.
        counted: what position ids of the loop are, `absolute` or `from-zero`, in every slice; None: decided for each tensor.
    """

    def __init__(self, slices: CurrentSlice, counted: str | None = None) -> None:
        self._slices, self._counted = slices, counted

    def absolute(self, position_ids: Tensor, tokens: Tensor) -> Tensor:
        """The positions in the whole sequence.

        Args:
            position_ids: [b, s], what an embedding is given.
            tokens: [b, s], the token ids that it is given with them.

        Raises:
            ConfigError: the positions are neither the loop's own count nor of its batch, or could be both.
        """
        part = self._slices.part
        if part is None or not part.offset:
            return position_ids
        is_from_zero = self._counted == "from-zero" if self._counted else not self._is_read(position_ids, tokens, part)
        return position_ids + part.offset if is_from_zero else position_ids

    def _is_read(self, position_ids: Tensor, tokens: Tensor, part: SlicePart) -> bool:
        """Whether they are of the batch, not the loop's own count.

        Of tensor-parallel ranks, which come here together with the same positions, some may not have read it.
        """
        found = self._source(position_ids, tokens)
        size = parallel_state.get_tensor_model_parallel_world_size()
        is_counted = (found is not _Read.YES or size > 1) and _is_count(position_ids, part)
        if size > 1 and is_counted:
            found = _most(found, position_ids.device)
        elif size > 1 and parallel_state.get_tensor_model_parallel_rank() > 0 and self._slices.batch is None:
            found = _Read.YES
        if found is _Read.YES:
            return True
        if is_counted is (found is _Read.MAYBE):
            raise ConfigError(_unknown(part, is_both=is_counted))
        return not is_counted

    def _source(self, position_ids: Tensor, tokens: Tensor) -> _Read:
        """Whether they are of the slice's batch."""
        tensors = list(tensors_of(self._slices.batch))
        for _, each in tensors:
            if each.data_ptr() == position_ids.data_ptr() and each.shape == position_ids.shape:
                return _Read.YES
        storage = position_ids.untyped_storage().data_ptr()
        is_named = any(key in POSITIONS for key, _ in tensors)
        for key, each in tensors:
            if each.untyped_storage().data_ptr() == storage:
                return _Read.MAYBE
            could_be = key in POSITIONS if is_named else key not in _NOT_POSITIONS
            if not could_be or each.is_floating_point() or each.dtype is torch.bool:
                continue
            if _has_values(each, position_ids) and not _has_values(each, tokens):
                return _Read.MAYBE
        return _Read.NO


def _is_count(position_ids: Tensor, part: SlicePart) -> bool:
    """Whether they are 0, 1, ... in every row of the slice."""
    count = torch.arange(part.length, device=position_ids.device)
    return position_ids.shape[-1:] == count.shape and bool((position_ids == count).all())


def _has_values(tensor: Tensor, position_ids: Tensor) -> bool:
    """Whether two tensors are equal, but for the type, or the device, or dimensions in front for which they are the same."""
    if tensor.shape[-1:] != position_ids.shape[-1:] or not tensor.dim():
        return False
    if tensor.shape != position_ids.shape and tensor.numel() not in (tensor.size(-1), position_ids[0].numel()):
        return False
    return bool((tensor.to(position_ids.device) == position_ids).all())


def _most(found: _Read, device: torch.device) -> _Read:
    """The largest one of the tensor-parallel ranks."""
    flag = torch.tensor([int(found)], dtype=torch.int, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    return _Read(int(flag.item()))


def _unknown(part: SlicePart, *, is_both: bool) -> str:
    count = f"0 to {part.length - 1}, which forward_step_func may have counted itself,"
    what = f"{count} and also in the batch" if is_both else f"neither {count} nor a tensor of the batch that it read"
    return (
        f"slice {part.index}, tokens {part.offset} to {part.end - 1}: the position ids that the model is given are {what}: give "
        "--zero-bubble-slice-positions (install's zero_bubble_slice_positions) absolute if they are those of the whole sequence, "
        "or from-zero if they begin at 0 in every slice"
    )


def count_from_slice(module: nn.Module, slices: CurrentSlice, positions: PositionIds) -> bool:
    """Let a position embedding begin at the current slice's first token. Undone by deleting its attribute `forward`.

    Args:
        module: any module of a model.
        slices: of the rank.
        positions: makes position ids those of the whole sequence.

    Returns:
        Whether it is one of the modules that need it.
    """
    if isinstance(module, RotaryEmbedding):
        module.forward = _Rotary(module, slices)
    elif isinstance(module, LanguageModelEmbedding) and module.add_position_embedding:
        module.forward = _Learned(module, positions)
    else:
        return False
    return True


class _Replaced:
    """The `forward` of a module, in place of its class's."""

    def __init__(self, module: nn.Module, of: Any) -> None:
        self._module = weakref.ref(module)
        self._of = of

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        return type(module).forward(module, *args, **kwargs)


class _Rotary(_Replaced):
    """Of megatron-core's `RotaryEmbedding` and its subclasses, which take an offset."""

    _of: CurrentSlice

    def __call__(self, max_seq_len: int, offset: int = 0, **others: Any) -> Any:
        part = self._of.part
        return self._forward(max_seq_len, offset if part is None else offset + part.offset, **others)

    def cache_clear(self) -> None:
        """As the method of the `lru_cache` around the class's `forward`."""
        module: Any = self._module()
        type(module).forward.cache_clear()


class _Learned(_Replaced):
    """Of an embedding with learned positions."""

    _of: PositionIds

    def __call__(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._forward(input_ids, self._of.absolute(position_ids, input_ids), *args, **kwargs)
