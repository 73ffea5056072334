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
    """Path prefixes of indexed datasets, without .bin and .idx: one prefix, several, or pairs of weight and prefix."""
    split: str = "969, 30, 1"
    """Proportions of training, validation and test documents, separated by commas."""
    mock_data: bool = False
    """Train on synthetic data instead of --data-path."""
    data_cache_path: str | None = None
    """Directory to cache sample indices in. Default: beside the dataset; indices of blended datasets are then not cached."""
    tokenizer_type: Literal["ByteLevelTokenizer", "NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"] = (
        "ByteLevelTokenizer"
    )
    """Tokenizer that the dataset was made with. ByteLevelTokenizer needs no files: every byte is a token."""
    tokenizer_model: str | None = None
    """Path (or Hugging Face name) of the tokenizer, for HuggingFaceTokenizer and SentencePieceTokenizer."""
    vocab_size: int | None = None
    """Vocabulary size before padding. Default: the tokenizer's; NullTokenizer requires it."""
    num_workers: int = 0
    """Data loader processes per rank; 0 loads samples in the rank's own process."""
    reset_position_ids: bool = False
    """Restart position ids after each end-of-document token."""
    reset_attention_mask: bool = False
    """Mask attention across end-of-document tokens."""
    eod_mask_loss: bool = False
    """Mask the loss of end-of-document tokens."""
    mmap_bin_files: bool = True
    """Read .bin files through file pointers. By default they are memory-mapped."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")
        positive(self, "vocab_size")
        weights = re.split(r"[,/]\s*", self.split.strip())
        are_numbers = len(weights) <= 3 and all(re.fullmatch(r"\d*\.?\d+", weight.strip()) for weight in weights)
        if not are_numbers:
            raise ConfigError(f"--split {self.split!r} must be up to three proportions, for example 969,30,1")
        if not any(self.split_weights):
            raise ConfigError(f"--split {self.split!r} has no proportion above 0; give for example 969,30,1")
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
        """Proportions of training, validation and test documents, in any unit."""
        train, valid, test, *_ = (*map(float, re.split(r"[,/]", self.split)), 0.0, 0.0, 0.0)
        return train, valid, test

    @property
    def blend(self) -> tuple[list[str], list[float] | None]:
        """Dataset prefixes, and their weights or None if --data-path has none."""
        words = list(self.data_path)
        if len(words) % 2 == 0 and all(re.fullmatch(r"\d*\.?\d+", word) for word in words[::2]):
            return words[1::2], [float(word) for word in words[::2]]
        return words, None
