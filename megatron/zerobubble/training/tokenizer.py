"""The tokenizers of the reference trainer and of tools/preprocess_data.py: bytes, or token ids that another tool made."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Literal

from megatron.zerobubble.errors import ConfigError

__all__ = ["BYTE_VOCAB_SIZE", "TokenizerConfig", "build_tokenizer"]

BYTE_VOCAB_SIZE = 256
"""Vocabulary of ByteLevelTokenizer: one token per byte. Byte 0 ends a document and byte 1 pads; neither occurs in text."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer."""

    tokenizer_type: Literal["ByteLevelTokenizer", "NullTokenizer"] = "ByteLevelTokenizer"
    """Tokenizer that the dataset is made with. ByteLevelTokenizer needs no files: every byte is a token. NullTokenizer is for
    token ids that another tool made, such as Megatron-LM's with its tokenizers."""
    vocab_size: int | None = None
    """Vocabulary size before padding. Default: 256; NullTokenizer requires it."""

    def __post_init__(self) -> None:
        if self.vocab_size is not None and not 0 < self.vocab_size < 2**31:
            raise ConfigError(f"--vocab-size {self.vocab_size} must be from 1 to {2**31 - 1:,}")
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        if self.tokenizer_type == "ByteLevelTokenizer" and self.known_vocab_size < BYTE_VOCAB_SIZE:
            raise ConfigError(f"--vocab-size {self.vocab_size} is too small for ByteLevelTokenizer, which has 256 bytes")

    @property
    def known_vocab_size(self) -> int:
        """--vocab-size or its default."""
        return self.vocab_size or BYTE_VOCAB_SIZE


def build_tokenizer(config: TokenizerConfig) -> Any:
    """Make a tokenizer, of megatron-core's class."""
    _import_libraries()
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.text.text_tokenizer import TOKENIZER_MAPPING_LIBRARIES

    library = {"ByteLevelTokenizer": "byte-level", "NullTokenizer": "null"}[config.tokenizer_type]
    name = library if library in TOKENIZER_MAPPING_LIBRARIES else f"{library}-text"  # later releases say null-text
    return MegatronTokenizer.from_pretrained(None, {"library": name}, vocab_size=config.known_vocab_size)


def _import_libraries() -> None:
    """Import megatron-core's tokenizer classes without `transformers`.

    They import it wherever it is installed, which takes seconds on every rank, and these two never use it.
    """
    hides = "transformers" not in sys.modules
    if hides:
        sys.modules["transformers"] = None  # type: ignore[assignment]  # an import of it fails as if it were not installed
    try:
        importlib.import_module("megatron.core.tokenizers.text.libraries")
    finally:
        if hides:
            del sys.modules["transformers"]
