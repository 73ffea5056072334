"""The batches of slices: a microbatch is read once, and each of its slices gets its part.

`forward_step_func` runs once per slice and reads from an iterator, as without slices. The iterator returns the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart

__all__ = ["Cut", "SlicedBatches", "cut_batch", "has_positions"]


class Cut(Protocol):
    """Cuts what an iterator returns."""

    def __call__(self, batch: Any, offset: int, length: int, /) -> Any:
        """The part of a batch that has the tokens from `offset` on, `length` of them."""


class SlicedBatches:
    """An iterator that returns the current slice's part of each batch.

    Args:
        iterator: over microbatches.
        slices: of the rank.
        cut: cuts a batch; None: `cut_batch`.
    """

    def __init__(self, iterator: Any, slices: CurrentSlice, cut: Cut | None = None) -> None:
        self._iterator, self._slices, self._cut = iterator, slices, cut
        self._batches: list[Any] = []
        """What the F of the microbatch's first slice has read."""
        self._next = 0
        self._pass = -1

    def __iter__(self) -> SlicedBatches:
        return self

    def __next__(self) -> Any:
        slices = self._slices
        part = slices.part
        if part is None:
            raise ExecutionError("a batch of slices is read outside of a forward pass")
        if self._pass != slices.passes:
            self._pass, self._next = slices.passes, 0
            if part.index == 0:
                self._batches.clear()
        if self._next == len(self._batches):
            if part.index:
                raise ExecutionError(
                    f"forward_step_func reads {self._next + 1} batches in slice {part.index} and {self._next} in slice 0"
                )
            self._batches.append(next(self._iterator))
        batch = self._batches[self._next]
        self._next += 1
        slices.whole_batch = batch
        slices.batch = cut_batch(batch, part) if self._cut is None else self._cut(batch, part.offset, part.length)
        return slices.batch


def cut_batch(batch: Any, part: SlicePart) -> Any:
    """The part of a batch that a slice has.

    Args:
        batch: a tensor, or a dictionary, tuple or list of them: [b, S, ...], [b, S + 1] for tokens that are followed by the next
            one, masks [b or 1, 1, S, S], and tensors of one dimension, numbers, strings and None, which are not cut. S is the
            sequence length that the schedule was called with.
        part: the slice.

    Returns:
        The same with contiguous tensors: [b, s, ...], [b, s + 1], [b or 1, 1, s, end of the slice].

    Raises:
        ConfigError: a tensor has another shape, or sequences are packed.
    """
    return _cut(batch, part, "the batch")


def _cut(batch: Any, part: SlicePart, name: str) -> Any:
    if isinstance(batch, Mapping):
        if any(key in batch and batch[key] is not None for key in ("cu_seqlens", "packed_seq_params")):
            raise ConfigError(
                "slices do not go with packed sequences, whose attention begins anew inside of a slice, and the batch has them "
                "(cu_seqlens or packed_seq_params): leave one of the two out"
            )
        return {key: _cut(value, part, f"{key!r} of the batch") for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_cut(value, part, f"item {number} of the batch") for number, value in enumerate(batch)]
        return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    if isinstance(batch, Tensor):
        return _cut_tensor(batch, part, name)
    if batch is None or isinstance(batch, (bool, int, float, str)):
        return batch
    raise ConfigError(f"{name} is a {type(batch).__name__}: give install the argument cut, which cuts the loop's batches")


def _cut_tensor(tensor: Tensor, part: SlicePart, name: str) -> Tensor:
    whole = part.whole
    if tensor.is_nested:
        raise ConfigError(f"{name} is a nested tensor, whose sequences slices would cut apart: pad them, or leave out slices")
    if tensor.dim() >= 2 and tensor.size(1) == whole:
        return tensor.narrow(1, part.offset, part.length).contiguous()
    if tensor.dim() == 2 and tensor.size(1) == whole + 1:
        return tensor.narrow(1, part.offset, part.length + 1).contiguous()
    if tensor.dim() == 4 and tensor.shape[2:] == (whole, whole):
        return tensor.narrow(2, part.offset, part.length).narrow(3, 0, part.end).contiguous()
    if tensor.dim() < 2 and tensor.numel() not in (whole, whole + 1):
        return tensor
    raise ConfigError(
        f"{name} has shape {tuple(tensor.shape)}, and a slice is cut from [b, {whole}, ...] along its second dimension: give "
        "install the argument cut, which cuts the loop's batches"
    )


def has_positions(batch: Any, part: SlicePart) -> bool:
    """Whether a slice's part of a batch has position ids: by their name, or else by the values of its tensors."""
    if isinstance(batch, Mapping):
        return batch.get("position_ids") is not None
    if isinstance(batch, (list, tuple)):
        return any(has_positions(each, part) for each in batch)
    if isinstance(batch, Tensor):
        is_row = batch.dim() == 2 and batch.size(1) == part.length and not batch.is_floating_point()
        return is_row and torch.equal(batch[0].cpu(), torch.arange(part.offset, part.end, dtype=batch.dtype))
    return getattr(batch, "position_ids", None) is not None
