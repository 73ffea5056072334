"""Finds token ids outside of the vocabulary, and names their dataset, when a batch is read.

An embedding raises an IndexError for them on the CPU and a device assertion on a GPU, neither of which names the data; and ids
between the vocabulary and its padded size train on without a word. Datasets of another tokenizer have them, and those whose index
has another dtype of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["checked_batches", "vocabulary_size"]


def vocabulary_size(settings: Settings, tokenizer: Any) -> int:
    """Number of token ids that data may have: the tokenizer's, or --vocab-size if that is larger."""
    return max(int(tokenizer.vocab_size), settings.tokenizer.vocab_size or 0)


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
                raise DataError(
                    f"{prefix}.bin has the token {low if low < 0 else high}, and the vocabulary has {size}, from 0 on: give the "
                    "tokenizer and --vocab-size that the data was made with, or preprocess the text again"
                )
        yield batch
