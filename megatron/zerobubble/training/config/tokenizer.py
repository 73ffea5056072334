"""The tokenizer: the flags of the group "Tokenizer", which the reference trainer and tools/preprocess_data.py share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, positive

__all__ = ["BYTE_VOCAB_SIZE", "TokenizerConfig"]

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
        positive(self, "vocab_size")
        at_most(self, 2**31 - 1, "vocab_size")
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        if self.tokenizer_type == "ByteLevelTokenizer" and self.known_vocab_size < BYTE_VOCAB_SIZE:
            raise ConfigError(f"--vocab-size {self.vocab_size} is too small for ByteLevelTokenizer, which has 256 bytes")

    @property
    def known_vocab_size(self) -> int:
        """--vocab-size or its default."""
        return self.vocab_size or BYTE_VOCAB_SIZE
