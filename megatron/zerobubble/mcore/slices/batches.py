"""The batches of slices: a microbatch is read once, and each of its slices gets its part.

`forward_step_func` runs once per slice and reads from an iterator, as without slices. The iterator returns the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.flags.loop_options import Cut
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart

__all__ = ["POSITIONS", "SlicedBatches", "cut_batch", "tensors_of"]

POSITIONS = ("position_ids", "positions")
"""Names of position ids, whose last dimension is the sequence."""
_PER_TOKEN = (
    *("tokens", "input_ids", "text", "labels", "loss_mask", "inputs_embeds", "advantages", "returns", "rewards", "values"),
    *("log_probs", "logprobs", "old_log_probs", "old_logprobs", "ref_log_probs", "ref_logprobs"),
)
"""Names of tensors with something for each token, whose second dimension is the sequence."""


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
        slices.batch = cut_batch(batch, part) if self._cut is None else self._cut(batch, part.offset, part.length)
        return slices.batch


def cut_batch(batch: Any, part: SlicePart) -> Any:
    """The part of a batch that a slice has.

    A tensor is cut only where it is certain which of its dimensions is the sequence. With b rows, S tokens per sequence:

    - rows of integers or booleans, [b, S], or [b, S + 1] where each token is followed by the next one;
    - tensors of any type [b, S, ...] or [b, S + 1] with one of the usual names of something per token (tokens, labels, loss_mask,
      advantages, log_probs, ...);
    - position ids by their name, position_ids or positions: [..., S].

    Tensors of at most one dimension, numbers, strings and None are the same in every slice.

    Args:
        batch: a tensor, or a dictionary, tuple or list of them.
        part: the slice. Its `whole` is S, the sequence length that the schedule was called with.

    Returns:
        The same with contiguous tensors: [b, s, ...], [b, s + 1], [..., s].

    Raises:
        ConfigError: it is not certain how a tensor is cut, sequences are packed, or there is an attention mask.
    """
    return _cut(batch, part, None, "the batch")


def tensors_of(batch: Any, key: str | int | None = None) -> Iterator[tuple[str | int | None, Tensor]]:
    """Each tensor of a batch, with its name, or its number in a tuple or list."""
    if isinstance(batch, Tensor):
        if batch.layout is torch.strided and not batch.is_nested:
            yield key, batch
        return
    values: Any = batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})
    if isinstance(batch, (list, tuple)):
        values = dict(zip(getattr(batch, "_fields", range(len(batch))), batch, strict=True))
    for name, value in values.items():
        yield from tensors_of(value, name)


def _cut(batch: Any, part: SlicePart, key: str | int | None, name: str) -> Any:
    if isinstance(batch, Mapping):
        if any(each in batch and batch[each] is not None for each in ("cu_seqlens", "packed_seq_params")):
            raise ConfigError(
                "slices do not go with packed sequences, whose attention begins anew inside of a slice, and the batch has them "
                "(cu_seqlens or packed_seq_params): leave one of the two out"
            )
        return {each: _cut(value, part, each, f"{each!r} of the batch") for each, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        names: Sequence[str | int] = getattr(batch, "_fields", range(len(batch)))
        parts = []
        for each, value in zip(names, batch, strict=True):
            own = key if isinstance(key, str) and isinstance(each, int) else each  # items of a named list have its name
            where = f"item {each} of {name}" if isinstance(each, int) else f"{each!r} of the batch"
            parts.append(_cut(value, part, own, where))
        return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    if isinstance(batch, Tensor):
        return _cut_tensor(batch, part, key, name)
    if batch is None or isinstance(batch, (bool, int, float, str)):
        return batch
    raise ConfigError(f"{name} is a {type(batch).__name__}: give install the argument cut, which cuts the loop's batches")


def _cut_tensor(tensor: Tensor, part: SlicePart, key: str | int | None, name: str) -> Tensor:
    whole = part.whole
    if tensor.is_nested:
        raise ConfigError(f"{name} is a nested tensor, whose sequences slices would cut apart: pad them, or leave out slices")
    sizes = tensor.shape
    is_row_of_flags = tensor.dim() == 2 and sizes != (whole, whole)  # one for each token
    if (key == "attention_mask" and not is_row_of_flags) or (tensor.dtype is torch.bool and tensor.dim() == 4):
        raise ConfigError(
            f"slices do not go with an attention mask, and {name}, of shape {tuple(sizes)}, is one: give None, with which "
            "attention is causal, or leave out slices"
        )
    if key in POSITIONS and tensor.dim() and sizes[-1] == whole:
        return tensor.narrow(-1, part.offset, part.length).contiguous()
    is_row = tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex()
    if (is_row or (key in _PER_TOKEN and tensor.dim() >= 2)) and (
        sizes[1] == whole or (sizes[1] == whole + 1 and tensor.dim() == 2)
    ):
        return tensor.narrow(1, part.offset, part.length + sizes[1] - whole).contiguous()
    if tensor.dim() < 2 and tensor.numel() not in (whole, whole + 1):
        return tensor
    kind = str(tensor.dtype).removeprefix("torch.")
    raise ConfigError(
        f"{name} has shape {tuple(sizes)} and type {kind}, and nothing says which dimension is the sequence of {whole} tokens: "
        "give Slices cut=a function that cuts the loop's batches"
    )
