"""Tokenizes documents. Importing it imports torch and megatron-core, quietly."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
from megatron.zerobubble.training.data.texts import Document

with quiet_third_parties():
    from megatron.core.datasets.indexed_dataset import DType

    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer

__all__ = ["Encoded", "Encoder"]


class Encoded(NamedTuple):
    """A document's tokens."""

    ids: np.ndarray[Any, Any]
    """[n] token ids, in the smallest dtype of a dataset that holds the vocabulary: uint16 or int32."""
    end: int
    """Bytes of the input that were read when the document was complete."""


class Encoder:
    """Tokenizes documents.

    Args:
        config: the tokenizer.
        appends_eod: whether to append an end-of-document token to each document.
    """

    def __init__(self, config: TokenizerConfig, *, appends_eod: bool) -> None:
        tokenizer = build_tokenizer(config)
        self.vocab_size: int = tokenizer.vocab_size
        """Vocabulary size before padding."""
        self.dtype = DType.optimal_dtype(self.vocab_size)
        """numpy's type of the token ids."""
        self._tokenize = tokenizer.tokenize
        self._suffix = [int(tokenizer.eod)] if appends_eod else []

    def __call__(self, document: Document) -> Encoded:
        """The document's tokens. Raises DataError, with the document's place, if it cannot be tokenized."""
        try:
            ids = np.asarray([*self._tokenize(document.text), *self._suffix], dtype=np.int64)
        except Exception as error:  # libraries raise all kinds, for texts of all kinds
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{document.place} cannot be tokenized: {reason or type(error).__name__}") from error
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise DataError(f"{document.place} has the token {ids.max()}, outside of the vocabulary of {self.vocab_size}")
        return Encoded(ids.astype(self.dtype), document.end)
