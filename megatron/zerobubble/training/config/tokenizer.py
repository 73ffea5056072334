"""The tokenizer: the flags of the group "Tokenizer", which pretrain_gpt.py and tools/preprocess_data.py share."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron.zerobubble.errors import ConfigError, DataError
from megatron.zerobubble.flags.require import at_most, positive

__all__ = ["BYTE_VOCAB_SIZE", "TokenizerConfig"]

BYTE_VOCAB_SIZE = 256
"""Vocabulary of ByteLevelTokenizer: one token per byte. Byte 0 ends a document and byte 1 pads; neither occurs in text."""

_PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
}
"""--tokenizer-type -> the package that it needs."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer."""

    tokenizer_type: Literal[
        "ByteLevelTokenizer",
        "NullTokenizer",
        "HuggingFaceTokenizer",
        "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer",
        "Llama2Tokenizer",
    ] = "ByteLevelTokenizer"
    """Tokenizer that the dataset is made with. ByteLevelTokenizer needs no files: every byte is a token.
    GPTSentencePieceTokenizer and Llama2Tokenizer are other names of SentencePieceTokenizer."""
    tokenizer_model: str | None = None
    """The tokenizer's file (SentencePiece's .model), or for HuggingFaceTokenizer its directory or name on the hub."""
    vocab_size: int | None = None
    """Vocabulary size before padding. Default: the tokenizer's; NullTokenizer requires it."""
    trust_remote_code: bool = False
    """Run Python code that comes with a Hugging Face tokenizer."""
    tokenizer_hf_include_special_tokens: bool = field(default=True, metadata={"flag": "--tokenizer-hf-no-include-special-tokens"})
    """Leave out the special tokens that a Hugging Face tokenizer puts around a text, such as its first one."""

    def __post_init__(self) -> None:
        positive(self, "vocab_size")
        at_most(self, 2**31 - 1, "vocab_size")
        kind = self.tokenizer_type
        if kind == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        if kind == "ByteLevelTokenizer" and (self.vocab_size or BYTE_VOCAB_SIZE) < BYTE_VOCAB_SIZE:
            raise ConfigError(f"--vocab-size {self.vocab_size} is too small for ByteLevelTokenizer, which has 256 bytes")
        if kind in _PACKAGES and self.tokenizer_model is None:
            raise ConfigError(f"--tokenizer-type {kind} needs --tokenizer-model")

    @property
    def package(self) -> str | None:
        """The package that the tokenizer needs; None if none."""
        return _PACKAGES.get(self.tokenizer_type)

    @property
    def known_vocab_size(self) -> int | None:
        """The vocabulary size that the flags give; None if it is known only from the tokenizer's files."""
        return self.vocab_size or (BYTE_VOCAB_SIZE if self.tokenizer_type == "ByteLevelTokenizer" else None)

    def check(self) -> None:
        """Raise unless the tokenizer's package is installed and its files are there.

        Raises:
            ConfigError: the package is missing; the message says how to install it.
            DataError: a file is missing.
        """
        package = self.package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--tokenizer-type {self.tokenizer_type} needs the package {package}, which is not installed: "
                f"pip install {package}, or all of them by pip install 'megatron-zerobubble[tokenizers]'"
            )
        path = self.tokenizer_model
        if package == "sentencepiece" and path is not None and not Path(path).is_file():
            raise DataError(f"--tokenizer-type {self.tokenizer_type} --tokenizer-model {path}: there is no such file")
