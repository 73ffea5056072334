"""Finds token ids outside of the vocabulary, and names their dataset, document and position.

An embedding raises an IndexError for them on the CPU and a device assertion on a GPU, neither of which names the data; and ids
between the vocabulary and its padded size train on without a word. Datasets of another tokenizer have them, and those whose index
has another dtype of the same size. A small dataset is searched before the job starts. In a larger one every batch is checked when
it is read.

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
        raise _error(index.prefix, int(tokens[where]), document=document, position=position, size=size)


def checked_batches(
    batches: Iterable[dict[str, torch.Tensor]], samples: Iterable[list[int]], dataset: Any, *, size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches whose token ids are in the vocabulary.

    Args:
        batches: on the host, with tokens and labels [b, S], int64.
        samples: per batch, the numbers of its samples in the dataset.
        dataset: megatron-core's GPTDataset, or one of documents.
        size: of the vocabulary.

    Raises:
        DataError: a token id is negative, or not below `size`.
    """
    for batch, numbers in zip(batches, samples, strict=False):  # the loader ends first, or at the same time
        for name in ("tokens", "labels"):
            low, high = torch.aminmax(batch[name])
            if low < 0 or high >= size:
                row = int(((batch[name] < 0) | (batch[name] >= size)).any(dim=1).nonzero()[0])
                raise _locate(dataset, numbers[row], size)
        yield batch


def _locate(dataset: Any, sample: int, size: int) -> DataError:
    """The error of a sample that has a token id outside of the vocabulary."""
    if hasattr(dataset, "find"):
        prefix, document, position, token = dataset.find(sample, size)
        return _error(prefix, token, document=document, position=position, size=size)
    shuffled = dataset.shuffle_index[sample]
    (first, begin), (last, end) = (map(int, dataset.sample_index[each]) for each in (shuffled, shuffled + 1))
    for entry in range(first, last + 1):
        document = int(dataset.document_index[entry])
        tokens = dataset.dataset.get(document)
        skipped = begin if entry == first else 0
        tokens = tokens[skipped : end + 1 if entry == last else None]
        bad = ((tokens < 0) | (tokens >= size)) & (tokens != dataset._pad_token_id)
        if bad.any():
            where = int(np.argmax(bad))
            return _error(dataset.dataset_path, int(tokens[where]), document=document, position=skipped + where, size=size)
    return DataError(
        f"{dataset.dataset_path}.bin has a token outside of the vocabulary of {size} in sample {sample}, and had none before"
    )


def _error(prefix: str, token: int, *, document: int, position: int, size: int) -> DataError:
    return DataError(
        f"{prefix}.bin: document {document} has the token {token} at position {position}, and the vocabulary has {size}, "
        "from 0 on: give "
        "the tokenizer and --vocab-size that the data was made with, or preprocess the text again"
    )
