"""Datasets: the flags of the group "Data"."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, not_negative, positive
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.training.config.data_blend import SPLITS, Sources, parse_blend, read_blend, read_blends_per_split

__all__ = ["DataConfig"]

_DEFAULT_SPLIT = "969, 30, 1"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data_path: tuple[str, ...] = field(default=(), metadata={"metavar": "[WEIGHT] PREFIX"})
    """Path prefixes of indexed datasets, without .bin and .idx: one prefix, several (each is read once), or pairs of weight and
    prefix. --split divides them."""
    data_args_path: str | None = field(default=None, metadata={"metavar": "FILE"})
    """File with what --data-path would be given."""
    train_data_path: tuple[str, ...] = field(default=(), metadata={"metavar": "[WEIGHT] PREFIX"})
    """Datasets to train on, in the form of --data-path."""
    valid_data_path: tuple[str, ...] = field(default=(), metadata={"metavar": "[WEIGHT] PREFIX"})
    """Datasets to validate on, in the form of --data-path."""
    test_data_path: tuple[str, ...] = field(default=(), metadata={"metavar": "[WEIGHT] PREFIX"})
    """Datasets to evaluate on once, at the end, in the form of --data-path."""
    per_split_data_args_path: str | None = field(default=None, metadata={"metavar": "FILE"})
    """JSON file with what --train-data-path, --valid-data-path and --test-data-path would be given, as lists under train, valid
    and test."""
    split: str | None = None
    """Proportions of training, validation and test documents, separated by commas. Default: 969, 30, 1."""
    mock_data: bool = False
    """Train on synthetic data instead of --data-path."""
    data_cache_path: str | None = None
    """Directory to cache sample indices in. Default: beside the dataset; indices of blended datasets are then not cached."""
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
    variable_seq_lengths: bool = False
    """Make each document a sample of its own length, and pad a microbatch to its longest sample instead of --seq-length. Longer
    documents become several samples."""
    pad_length_multiple: int = 1
    """With --variable-seq-lengths: pad microbatches to a multiple of this many tokens."""
    pack_sequences: bool = False
    """Pack several documents into each sample of at most --seq-length tokens. No document attends to another one. Without
    --variable-seq-lengths samples are padded to --seq-length."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")
        positive(self, "pad_length_multiple")
        at_most(self, 1024, "num_workers")
        weights = re.split(r"[,/]\s*", self.split_text.strip())
        are_numbers = len(weights) <= 3 and all(re.fullmatch(r"\d*\.?\d+", weight.strip()) for weight in weights)
        if not are_numbers:
            raise ConfigError(f"--split {self.split_text!r} must be up to three proportions, for example 969,30,1")
        if not all(map(math.isfinite, self.split_weights)):
            raise ConfigError(f"--split {quoted(self.split_text)} has a number that is too large; give for example 969,30,1")
        if not any(self.split_weights):
            raise ConfigError(f"--split {self.split_text!r} has no proportion above 0; give for example 969,30,1")
        self._check_documents()
        given = self._given_sources()
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} are both given; choose one")
        if not given:
            raise ConfigError("no data: give --data-path PREFIX (see tools/preprocess_data.py), or --mock-data")
        if self.split is not None and given[0] not in ("--data-path", "--data-args-path", "--mock-data"):
            raise ConfigError(f"--split divides --data-path; {given[0]} is divided already, so leave --split out")

    def _check_documents(self) -> None:
        if self.pad_length_multiple > 1 and not self.variable_seq_lengths:
            raise ConfigError(f"--pad-length-multiple {self.pad_length_multiple} needs --variable-seq-lengths")
        flag = self.document_flag
        if flag is None:
            return
        if self.mock_data:
            raise ConfigError(f"{flag} reads documents, and --mock-data has none; give --data-path")
        others = {
            "--reset-position-ids": self.reset_position_ids,
            "--reset-attention-mask": self.reset_attention_mask,
            "--eod-mask-loss": self.eod_mask_loss,
        }
        for other, is_given in others.items():
            if is_given:
                raise ConfigError(
                    f"{other} is for samples that run across documents, and {flag} keeps documents apart; leave it out"
                )

    @property
    def document_flag(self) -> str | None:
        """The flag that makes documents samples, for errors; None if none is given."""
        flags = {"--pack-sequences": self.pack_sequences, "--variable-seq-lengths": self.variable_seq_lengths}
        return next((flag for flag, is_given in flags.items() if is_given), None)

    @property
    def reads_documents(self) -> bool:
        """Whether samples are documents (`data.documents`), instead of pieces of --seq-length of all text (megatron-core's)."""
        return self.document_flag is not None

    def _given_sources(self) -> list[str]:
        """The flags among those that name the data of a run, of which there may be one."""
        paths = (self.train_data_path, self.valid_data_path, self.test_data_path)
        own = next((f"--{name}-data-path" for name, words in zip(SPLITS, paths, strict=True) if words), "--train-data-path")
        flags = {
            "--mock-data": self.mock_data,
            "--data-path": bool(self.data_path),
            "--data-args-path": self.data_args_path is not None,
            own: any(paths),
            "--per-split-data-args-path": self.per_split_data_args_path is not None,
        }
        return [flag for flag, is_given in flags.items() if is_given]

    @property
    def split_text(self) -> str:
        """--split, or its default."""
        return _DEFAULT_SPLIT if self.split is None else self.split

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Proportions of training, validation and test documents, in any unit."""
        train, valid, test, *_ = (*map(float, re.split(r"[,/]", self.split_text)), 0.0, 0.0, 0.0)
        return train, valid, test

    @functools.cached_property
    def sources(self) -> Sources:
        """The datasets and their weights. Reads the file of --data-args-path or --per-split-data-args-path. Raises UserError."""
        if self.data_path:
            return Sources(divided=parse_blend(self.data_path, "--data-path"))
        if self.data_args_path is not None:
            return Sources(divided=read_blend(self.data_args_path))
        if self.per_split_data_args_path is not None:
            return Sources(per_split=read_blends_per_split(self.per_split_data_args_path))
        paths = (self.train_data_path, self.valid_data_path, self.test_data_path)
        train, valid, test = (
            parse_blend(words, f"--{name}-data-path") if words else None for name, words in zip(SPLITS, paths, strict=True)
        )
        return Sources(per_split=(train, valid, test))
