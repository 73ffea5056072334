"""How a dataset was tokenized: the small JSON file that tools/preprocess_data.py writes beside .bin and .idx.

It lets training reject a tokenizer or vocabulary that does not match the data. Standard library only: it is read before torch is
loaded.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.training.data.index import DatasetIndex

__all__ = ["CorpusInfo", "corpus_info_path", "read_corpus_info", "split_documents"]


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """How a dataset was tokenized."""

    tokenizer_type: str
    """As given to --tokenizer-type."""
    vocab_size: int
    """Vocabulary size before padding: all token ids are below this."""
    num_documents: int
    """Documents in the dataset."""
    num_tokens: int
    """Tokens in the dataset."""

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def check_matches(self, tokenizer_type: str, vocab_size: int) -> None:
        """Raise DataError unless the flags name the data's tokenizer and vocabulary."""
        if tokenizer_type != self.tokenizer_type:
            raise DataError(
                f"--tokenizer-type {tokenizer_type} does not match the data, which was made with {self.tokenizer_type}; "
                "give that one, or preprocess the text again"
            )
        if vocab_size != self.vocab_size:
            raise DataError(
                f"--vocab-size {vocab_size} does not match the data, which was made with a vocabulary of "
                f"{self.vocab_size}; give --vocab-size {self.vocab_size}, or preprocess the text again"
            )

    def check_index(self, index: DatasetIndex, *, bin_bytes: int) -> None:
        """Raise DataError unless the dataset has the documents and tokens that this file counts.

        Args:
            index: header of the dataset's index.
            bin_bytes: size of its .bin.
        """
        counted, found = (self.num_documents, self.num_tokens), (index.num_sequences, bin_bytes // index.item_bytes)
        if counted != found:
            raise DataError(
                f"{corpus_info_path(index.prefix)} counts {counted[0]} documents with {counted[1]} tokens, and the dataset "
                f"has {found[0]} "
                f"with {found[1]}: they are not of one run of the tool, or the index has another dtype; preprocess the text again"
            )


def corpus_info_path(prefix: str) -> Path:
    """Path of the JSON file beside the dataset `prefix`."""
    return Path(f"{prefix}.corpus.json")


def read_corpus_info(prefix: str) -> CorpusInfo | None:
    """Read the JSON file beside a dataset; None if there is no such file (datasets made by other tools).

    Raises:
        DataError: the file is damaged.
    """
    path = corpus_info_path(prefix)
    try:
        info = CorpusInfo(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({' '.join(str(error).split())[:80]}); preprocess the text again") from None
    numbers = (info.vocab_size, info.num_documents, info.num_tokens)
    if not isinstance(info.tokenizer_type, str) or not all(type(number) is int for number in numbers):
        raise DataError(f"{path} is damaged (a text, or a number, is something else); preprocess the text again")
    return info


def split_documents(num_documents: int, weights: tuple[float, ...]) -> tuple[range, ...]:
    """The numbers of the documents in each split, as megatron-core cuts them.

    megatron-core rounds the boundaries between splits, so that a small proportion of few documents may be empty. On an empty
    split it never terminates: it repeats the split until there are enough tokens.

    Args:
        num_documents: documents of the dataset.
        weights: proportions of the splits, in any unit; not all of them 0.
    """
    shares = itertools.accumulate((weight / sum(weights) for weight in weights), initial=0.0)
    cuts = [round(share * float(num_documents)) for share in shares]
    return tuple(range(begin, end) for begin, end in itertools.pairwise(cuts))
