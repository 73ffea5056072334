"""Datasets and tokenizer: the flags of the group "Data"."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.require import not_negative, positive

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data_path: tuple[str, ...] = field(default=(), metadata={"metavar": "[WEIGHT] PREFIX"})
    """Indexed dataset(s), without .bin/.idx: one prefix, several, or pairs of weight and prefix."""
    split: str = "969, 30, 1"
    """Proportions of training, validation and test documents."""
    mock_data: bool = False
    """Synthetic data instead of --data-path."""
    data_cache_path: str | None = None
    """Where sample indices are cached. Default: beside the data; those of several datasets together are not."""
    tokenizer_type: Literal["ByteLevelTokenizer", "NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"] = (
        "ByteLevelTokenizer"
    )
    """Which tokenizer the data was made with. ByteLevelTokenizer needs no files: a token is a byte."""
    tokenizer_model: str | None = None
    """Path (or Hugging Face name) of the tokenizer, for the types that have one."""
    vocab_size: int | None = None
    """Vocabulary before padding. Default: the tokenizer's; NullTokenizer needs it."""
    num_workers: int = 0
    """Processes per rank that load data ahead; 0 loads in the rank itself."""
    reset_position_ids: bool = False
    """Restart positions after each end of document."""
    reset_attention_mask: bool = False
    """No attention across an end of document."""
    eod_mask_loss: bool = False
    """No loss on end-of-document tokens."""
    mmap_bin_files: bool = True
    """Read .bin files with file pointers instead of memory maps."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")
        positive(self, "vocab_size")
        weights = re.split(r"[,/]\s*", self.split.strip())
        are_numbers = len(weights) <= 3 and all(re.fullmatch(r"\d*\.?\d+", weight.strip()) for weight in weights)
        if not are_numbers:
            raise ConfigError(f"--split {self.split!r} must be up to three proportions, for example 969,30,1")
        if not any(self.split_weights):
            raise ConfigError(f"--split {self.split!r} gives no share to anything; one must be above 0, for example 969,30,1")
        if self.mock_data and self.data_path:
            raise ConfigError("--mock-data and --data-path are both given; choose one")
        if not self.mock_data and not self.data_path:
            raise ConfigError("no data: give --data-path PREFIX (see tools/preprocess_data.py), or --mock-data")
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        if self.tokenizer_type == "ByteLevelTokenizer" and (self.vocab_size or 256) < 256:
            raise ConfigError(f"--vocab-size {self.vocab_size} is too small for ByteLevelTokenizer, which has 256 bytes")
        needs_model = self.tokenizer_type in ("HuggingFaceTokenizer", "SentencePieceTokenizer")
        if needs_model and self.tokenizer_model is None:
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs --tokenizer-model")

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Shares of training, validation and test documents, in any unit."""
        train, valid, test, *_ = (*map(float, re.split(r"[,/]", self.split)), 0.0, 0.0, 0.0)
        return train, valid, test

    @property
    def blend(self) -> tuple[list[str], list[float] | None]:
        """Prefixes and, where they were given, weights."""
        words = list(self.data_path)
        if len(words) % 2 == 0 and all(re.fullmatch(r"\d*\.?\d+", word) for word in words[::2]):
            return words[1::2], [float(word) for word in words[::2]]
        return words, None
