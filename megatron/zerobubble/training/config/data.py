"""Datasets and batch sizes: the flags of the group "Data"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, not_negative, positive
from megatron.zerobubble.messages import quoted

__all__ = ["DataConfig"]

_DEFAULT_SPLIT = "969, 30, 1"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    micro_batch_size: int
    """Samples per microbatch."""
    global_batch_size: int | None = None
    """Samples per iteration, over all microbatches and data-parallel ranks. Default: one microbatch per data-parallel rank."""
    data_path: str | None = field(default=None, metadata={"metavar": "PREFIX"})
    """Path prefix of an indexed dataset, without .bin and .idx. --split divides it."""
    split: str | None = None
    """Proportions of training, validation and test documents, separated by commas. Default: 969, 30, 1."""
    mock_data: bool = False
    """Train on synthetic data instead of --data-path."""
    num_workers: int = 0
    """Data loader processes per rank; 0 loads samples in the rank's own process."""
    dataloader_type: Literal["single"] = "single"
    """Order of samples: shuffled once by --seed, for all epochs, and read from the beginning to the end (single)."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")
        positive(self, "micro_batch_size", "global_batch_size")
        at_most(self, 2**31 - 1, "micro_batch_size", "global_batch_size")
        at_most(self, 1024, "num_workers")
        weights = re.split(r"[,/]\s*", self.split_text.strip())
        are_numbers = len(weights) <= 3 and all(re.fullmatch(r"\d*\.?\d+", weight.strip()) for weight in weights)
        if not are_numbers:
            raise ConfigError(f"--split {self.split_text!r} must be up to three proportions, for example 969,30,1")
        if not all(map(math.isfinite, self.split_weights)):
            raise ConfigError(f"--split {quoted(self.split_text)} has a number that is too large; give for example 969,30,1")
        if not any(self.split_weights):
            raise ConfigError(f"--split {self.split_text!r} has no proportion above 0; give for example 969,30,1")
        if self.mock_data and self.data_path is not None:
            raise ConfigError("--mock-data and --data-path are both given; choose one")
        if not self.mock_data and not self.data_path:
            raise ConfigError("no data: give --data-path PREFIX (see tools/preprocess_data.py), or --mock-data")

    @property
    def split_text(self) -> str:
        """--split, or its default."""
        return _DEFAULT_SPLIT if self.split is None else self.split

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Proportions of training, validation and test documents, in any unit."""
        train, valid, test, *_ = (*map(float, re.split(r"[,/]", self.split_text)), 0.0, 0.0, 0.0)
        return train, valid, test
