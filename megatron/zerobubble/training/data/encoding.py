"""Tokenizes documents, in this process or in several. Importing it imports torch and megatron-core, quietly.

The processes are forked from one that has these imports done (a fork server), which costs seconds once and not once per process.
Documents come back in order. Only a few pieces of text per process are under way at any time, however long the input is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
from megatron.zerobubble.training.data.processes import map_in_processes
from megatron.zerobubble.training.data.texts import Document

with quiet_third_parties():
    from megatron.core.datasets.indexed_dataset import DType

    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer, end_of_document

__all__ = ["Encoded", "Encoder", "encode"]

_PIECE_CHARACTERS = 200_000
_PIECE_DOCUMENTS = 1_000
"""A process gets documents in pieces of about this many characters, and at most this many documents."""


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

    Raises:
        UserError: the tokenizer cannot be loaded, or has no end-of-document token to append.
    """

    def __init__(self, config: TokenizerConfig, *, appends_eod: bool) -> None:
        tokenizer = build_tokenizer(config)
        self.vocab_size: int = tokenizer.vocab_size
        """Vocabulary size before padding."""
        self.dtype = DType.optimal_dtype(self.vocab_size)
        """numpy's type of the token ids."""
        self._tokenize = tokenizer.tokenize
        self._suffix = [end_of_document(tokenizer, "--append-eod looks")] if appends_eod else []

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


def encode(
    documents: Iterable[Document], encoder: Encoder, *, config: TokenizerConfig, appends_eod: bool, num_processes: int
) -> Iterator[Encoded]:
    """Tokenize documents, in order.

    Args:
        documents: the texts.
        encoder: tokenizes in this process.
        config: as given to `encoder`, for those of the other processes.
        appends_eod: as given to `encoder`.
        num_processes: 1 tokenizes in this process.

    Raises:
        DataError: a document cannot be read or tokenized, or a process died.
    """
    if num_processes == 1:
        yield from map(encoder, documents)
        return
    results = map_in_processes(
        _encode_piece,
        _pieces(documents),
        num_processes=num_processes,
        preload=[__name__, *(["transformers.models.auto"] if config.package == "transformers" else [])],
        initializer=_start_process,
        initargs=(config, appends_eod),
        remedy="give fewer --workers",
    )
    with closing(results):
        for piece in results:
            yield from piece


def _pieces(documents: Iterable[Document]) -> Iterator[list[Document]]:
    piece: list[Document] = []
    characters = 0
    for document in documents:
        piece.append(document)
        characters += len(document.text)
        if characters >= _PIECE_CHARACTERS or len(piece) == _PIECE_DOCUMENTS:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece


def _start_process(config: TokenizerConfig, appends_eod: bool) -> None:
    """Make the process's own tokenizer, once. Ctrl-C is the first process's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encode_piece.encoder = Encoder(config, appends_eod=appends_eod)  # type: ignore[attr-defined]


def _encode_piece(piece: list[Document]) -> list[Encoded]:
    return [_encode_piece.encoder(document) for document in piece]  # type: ignore[attr-defined]
