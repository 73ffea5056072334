"""Builds megatron-core's tokenizers by --tokenizer-type. The byte-level one needs no files and is the default."""

from __future__ import annotations

from typing import Any

from megatron.core.tokenizers import MegatronTokenizer

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.training.data.corpus import BYTE_VOCAB_SIZE

__all__ = ["build_tokenizer"]


def build_tokenizer(kind: str, *, model: str | None = None, vocab_size: int | None = None) -> Any:
    """Make a tokenizer.

    Args:
        kind: as given to --tokenizer-type.
        model: path or Hugging Face name of the tokenizer, for kinds that have files.
        vocab_size: vocabulary size before padding; NullTokenizer requires it.

    Raises:
        DataError: the tokenizer cannot be loaded, or has more tokens than `vocab_size`.
    """
    options: dict[str, Any] = {}
    if kind == "ByteLevelTokenizer":
        library, options = "byte-level", {"vocab_size": vocab_size or BYTE_VOCAB_SIZE}
    elif kind == "NullTokenizer":
        library, options = "null", {"vocab_size": vocab_size}
    else:
        library = {"HuggingFaceTokenizer": "huggingface", "SentencePieceTokenizer": "sentencepiece"}[kind]
    try:
        tokenizer = MegatronTokenizer.from_pretrained(model, {"library": library}, **options)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"--tokenizer-type {kind} --tokenizer-model {model}: cannot be loaded: {error}") from error
    if kind != "NullTokenizer" and vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size} is too small for the tokenizer, which has {tokenizer.vocab_size} tokens; "
            "leave it out to take the tokenizer's own"
        )
    return tokenizer
