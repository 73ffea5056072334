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

_TIKTOKEN_VOCAB_SIZE = 2**17
"""megatron-core's default for TikTokenizer."""

_PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "GPT2BPETokenizer": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
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
        "TikTokenizer",
        "GPT2BPETokenizer",
    ] = "ByteLevelTokenizer"
    """Tokenizer that the dataset is made with. ByteLevelTokenizer needs no files: every byte is a token.
    GPTSentencePieceTokenizer and Llama2Tokenizer are other names of SentencePieceTokenizer."""
    tokenizer_model: str | None = None
    """The tokenizer's file (SentencePiece's .model, TikTokenizer's .json), or for HuggingFaceTokenizer its directory or name on
    the Hugging Face hub."""
    vocab_file: str | None = None
    """vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt of GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Vocabulary size before padding. Default: the tokenizer's; NullTokenizer requires it, and TikTokenizer has 131072."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that HuggingFaceTokenizer and GPT2BPETokenizer add to the vocabulary if it lacks them, and TikTokenizer's
    own, which must include <unk>, <s>, </s>, <mask>, <pad>, <cls> and <sep>."""
    trust_remote_code: bool = False
    """Run Python code that comes with a Hugging Face tokenizer."""
    tokenizer_hf_include_special_tokens: bool = field(default=True, metadata={"flag": "--tokenizer-hf-no-include-special-tokens"})
    """Leave out the special tokens that a Hugging Face tokenizer puts around a text, such as its first one."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """How TikTokenizer cuts text into words. Default: v2."""
    tiktoken_num_special_tokens: int = 1000
    """Special tokens of TikTokenizer, with those that are not used. They come first in the vocabulary."""

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "tiktoken_num_special_tokens")
        at_most(self, 2**31 - 1, "vocab_size", "tiktoken_num_special_tokens")
        kind = self.tokenizer_type
        if kind == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        if kind == "ByteLevelTokenizer" and (self.vocab_size or BYTE_VOCAB_SIZE) < BYTE_VOCAB_SIZE:
            raise ConfigError(f"--vocab-size {self.vocab_size} is too small for ByteLevelTokenizer, which has 256 bytes")
        if kind == "GPT2BPETokenizer":
            if self.vocab_file is None or self.merge_file is None:
                raise ConfigError("--tokenizer-type GPT2BPETokenizer needs --vocab-file vocab.json and --merge-file merges.txt")
        elif self.vocab_file is not None or self.merge_file is not None:
            raise ConfigError(f"--vocab-file and --merge-file are GPT2BPETokenizer's; --tokenizer-type {kind} has none")
        elif kind in _PACKAGES and self.tokenizer_model is None:
            raise ConfigError(f"--tokenizer-type {kind} needs --tokenizer-model")
        if self.special_tokens and kind not in ("HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer"):
            raise ConfigError(f"--special-tokens: --tokenizer-type {kind} cannot add any")

    @property
    def package(self) -> str | None:
        """The package that the tokenizer needs; None if none."""
        return _PACKAGES.get(self.tokenizer_type)

    @property
    def known_vocab_size(self) -> int | None:
        """The vocabulary size that the flags give; None if it is known only from the tokenizer's files."""
        defaults = {"ByteLevelTokenizer": BYTE_VOCAB_SIZE, "TikTokenizer": _TIKTOKEN_VOCAB_SIZE}
        return self.vocab_size or defaults.get(self.tokenizer_type)

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
        files = {"--vocab-file": self.vocab_file, "--merge-file": self.merge_file}
        if self.tokenizer_type != "HuggingFaceTokenizer" and package is not None:
            files["--tokenizer-model"] = self.tokenizer_model
        for flag, path in files.items():
            if path is not None and not Path(path).is_file():
                raise DataError(f"--tokenizer-type {self.tokenizer_type} {flag} {path}: there is no such file")
