"""Finds token ids outside of the vocabulary, and names their dataset.

An embedding raises an IndexError for them on the CPU and a device assertion on a GPU, neither of which names the data; and ids
between the vocabulary and its padded size train on without a word. Datasets of another tokenizer have them, and those whose index
has another dtype of the same size. A small dataset is searched before the job starts, and the token's place is named. In a larger
one every batch is checked when it is read.

-1 is megatron-core's padding, which it takes out of a batch and of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.index import DatasetIndex, file_bytes, read_index

__all__ = ["check_small_dataset", "checked_batches", "vocabulary_size"]

SEARCHED_BYTES = 256 * 2**20
"""Bytes of a .bin file that is searched before the job starts: it takes well under a second."""

_PIECE = 2**23
_PADDING = -1


def vocabulary_size(settings: Settings, tokenizer: Any) -> int:
    """Number of token ids that data may have: the tokenizer's, or --vocab-size if that is larger."""
    return max(int(tokenizer.vocab_size), settings.tokenizer.vocab_size or 0)


def check_small_dataset(settings: Settings, tokenizer: Any, *, at_most_bytes: int = SEARCHED_BYTES) -> None:
    """Search the dataset of a run for token ids outside of the vocabulary, if it is small.

    Args:
        settings: names the dataset, which `check_settings` has checked.
        tokenizer: has the vocabulary.
        at_most_bytes: of the .bin file; a dataset that is larger is not searched.

    Raises:
        DataError: a token id is negative, or not below the vocabulary's size.
    """
    if settings.data.data_path is None:
        return
    index, size = read_index(settings.data.data_path), vocabulary_size(settings, tokenizer)
    limits = np.iinfo(index.dtype)
    if file_bytes(index.bin_path) <= at_most_bytes and (limits.min < 0 or limits.max >= size):
        _search(index, size)


def _search(index: DatasetIndex, size: int) -> None:
    tokens = np.memmap(index.bin_path, dtype=index.dtype, mode="r")
    for first in range(0, len(tokens), _PIECE):
        piece = tokens[first : first + _PIECE]
        if piece.min() >= _PADDING and piece.max() < size:
            continue
        where = first + int(np.argmax((piece < _PADDING) | (piece >= size)))
        _, pointers, _ = index.entries()
        document = int(np.searchsorted(pointers, where * index.item_bytes, side="right")) - 1
        position = where - int(pointers[document]) // index.item_bytes
        raise _error(index.prefix, int(tokens[where]), where=f"position {position} of document {document}", size=size)


def checked_batches(batches: Iterable[dict[str, torch.Tensor]], *, prefix: str, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches whose token ids are in the vocabulary.

    Args:
        batches: on the host, with tokens and labels [b, S], int64.
        prefix: of the dataset.
        size: of the vocabulary.

    Raises:
        DataError: a token id is negative, or not below `size`.
    """
    for batch in batches:
        for name in ("tokens", "labels"):
            low, high = map(int, torch.aminmax(batch[name]))
            if low < 0 or high >= size:
                raise _error(prefix, low if low < 0 else high, where="a document", size=size)
        yield batch


def _error(prefix: str, token: int, *, where: str, size: int) -> DataError:
    return DataError(
        f"{prefix}.bin: {where} has the token {token}, and the vocabulary has {size}, from 0 on: give the tokenizer and "
        "--vocab-size that the data was made with, or preprocess the text again"
    )
