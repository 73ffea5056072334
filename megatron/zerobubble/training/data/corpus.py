"""What a dataset was made with: the small JSON file that tools/preprocess_data.py writes beside .bin and .idx.

With it the trainer refuses a tokenizer or vocabulary that does not fit, instead of training on wrong ids. The head of the index
(.idx) says how many documents there are, and so whether a split would have none. Standard library only: both are read before
torch is loaded.
"""

from __future__ import annotations

import itertools
import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.zerobubble.errors import DataError

__all__ = ["BYTE_VOCAB_SIZE", "CorpusInfo", "corpus_info_path", "default_vocab_size", "documents_of_splits", "read_corpus_info"]

_INDEX_HEAD = struct.Struct("<9sQBQ")
"""Magic, version, the code of the token's type, and the number of documents (sequences, in megatron-core's words)."""

BYTE_VOCAB_SIZE = 256
"""One token a byte. Byte 0 ends a document and byte 1 pads; neither occurs in text."""


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """How a dataset was tokenized."""

    tokenizer_type: str
    """As given to --tokenizer-type."""
    vocab_size: int
    """Token ids are below this."""
    num_documents: int
    """Documents in the dataset."""
    num_tokens: int
    """Tokens in the dataset."""

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def check_matches(self, tokenizer_type: str, vocab_size: int | None) -> None:
        """Raise DataError unless the flags name the tokenizer and vocabulary of the data."""
        if tokenizer_type != self.tokenizer_type:
            raise DataError(
                f"--tokenizer-type {tokenizer_type} does not match the data, which was made with {self.tokenizer_type}; "
                "give that one, or preprocess the text again"
            )
        vocab_size = default_vocab_size(tokenizer_type) if vocab_size is None else vocab_size
        if vocab_size is not None and vocab_size != self.vocab_size:
            raise DataError(
                f"--vocab-size {vocab_size} does not match the data, which was made with a vocabulary of "
                f"{self.vocab_size}; give --vocab-size {self.vocab_size}, or preprocess the text again"
            )


def default_vocab_size(tokenizer_type: str) -> int | None:
    """The vocabulary size that a tokenizer has without being told, or None when only its files say."""
    return BYTE_VOCAB_SIZE if tokenizer_type == "ByteLevelTokenizer" else None


def corpus_info_path(prefix: str) -> Path:
    """Where the information about the dataset `prefix` lies."""
    return Path(f"{prefix}.corpus.json")


def read_corpus_info(prefix: str) -> CorpusInfo | None:
    """The information beside a dataset; None where there is none (data made by other tools).

    Raises:
        DataError: the file is there but cannot be understood.
    """
    path = corpus_info_path(prefix)
    try:
        return CorpusInfo(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); preprocess the text again") from None


def documents_of_splits(prefix: str, weights: tuple[float, ...]) -> tuple[int, ...]:
    """How many documents of a dataset fall to each split.

    megatron-core cuts at rounded shares, so that a small share of few documents is nothing. It then never ends: it repeats the
    split until there are enough tokens.

    Args:
        prefix: of the dataset.
        weights: shares of the splits, in any unit; not all of them 0.

    Raises:
        DataError: the index cannot be read or understood.
    """
    path = Path(f"{prefix}.idx")
    try:
        with path.open("rb") as file:
            head = file.read(_INDEX_HEAD.size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(head) < _INDEX_HEAD.size or not head.startswith(b"MMIDIDX\x00\x00"):
        raise DataError(f"{path} is not the index of a dataset; preprocess the text again")
    num_documents = float(_INDEX_HEAD.unpack(head)[-1])
    shares = itertools.accumulate((weight / sum(weights) for weight in weights), initial=0.0)
    cuts = [round(share * num_documents) for share in shares]
    return tuple(end - begin for begin, end in itertools.pairwise(cuts))
