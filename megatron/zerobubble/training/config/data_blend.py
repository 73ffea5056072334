"""Which datasets samples are drawn from, and in which proportions: the flags --data-path and its kin, read.

One blend is divided into training, validation and test documents (--split), or each of the three has a blend of its own.
Standard library only: this runs before torch is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.zerobubble.errors import ConfigError, DataError

__all__ = ["SPLITS", "Blend", "Sources", "parse_blend", "read_blend", "read_blends_per_split"]

SPLITS = ("train", "valid", "test")
"""The splits in megatron-core's order, named as in --train-data-path and in the file of --per-split-data-args-path."""


@dataclass(frozen=True)
class Blend:
    """Datasets that are read together."""

    prefixes: tuple[str, ...]
    """Path prefixes of the datasets, without .bin and .idx."""
    weights: tuple[float, ...] | None = None
    """Share of the samples per dataset, in any unit. None: each dataset is read once, whole."""

    def for_megatron_core(self) -> tuple[list[str], list[float] | None]:
        """The blend as megatron-core's dataset config takes it."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


@dataclass(frozen=True)
class Sources:
    """Where the samples of a run come from: `divided`, or `per_split`, or neither for synthetic data."""

    divided: Blend | None = None
    """A blend that --split divides."""
    per_split: tuple[Blend | None, Blend | None, Blend | None] = (None, None, None)
    """A blend for each of training, validation and test; None for a split without data."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Path prefixes of all datasets, each once."""
        blends = (self.divided, *self.per_split)
        return tuple(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """The blend that `words` of `flag` name: one prefix, several, or pairs of weight and prefix.

    Raises:
        ConfigError: a weight is not above 0, or only some datasets have one.
    """
    if not words:
        raise ConfigError(f"{flag} is empty; give a prefix, several, or pairs of weight and prefix")
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return Blend(tuple(words))
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(weights):
        raise ConfigError(f"{flag} {' '.join(words)} has weights for some datasets only; give one before each prefix, or none")
    if not all(weight > 0.0 and math.isfinite(weight) for weight in given):
        raise ConfigError(f"{flag} {' '.join(words)}: weights must be greater than 0; leave out a dataset that is not read")
    return Blend(tuple(words[1::2]), tuple(given))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def read_blend(path: str) -> Blend:
    """The blend in the file of --data-args-path: the words of --data-path, separated by spaces or line ends. Raises UserError."""
    return parse_blend(_text("--data-args-path", path).split(), f"--data-args-path {path}:")


def read_blends_per_split(path: str) -> tuple[Blend | None, Blend | None, Blend | None]:
    """The blends in the file of --per-split-data-args-path: a JSON object with lists of words under train, valid and test.

    Raises:
        UserError: the file cannot be read or has another form.
    """
    flag = f"--per-split-data-args-path {path}"
    try:
        lists = json.loads(_text("--per-split-data-args-path", path))
    except ValueError as error:
        raise DataError(f"{flag} is not JSON: {error}") from None
    well_formed = isinstance(lists, dict) and all(
        isinstance(words, list) and all(isinstance(word, str | int | float) for word in words) for words in lists.values()
    )
    if not well_formed or not set(lists) <= set(SPLITS):
        raise DataError(
            f'{flag} must be a JSON object such as {{"train": ["0.3", "PREFIX", "0.7", "PREFIX"], "valid": ["PREFIX"]}}'
        )
    train, valid, test = (
        parse_blend([str(word) for word in lists[split]], f"{flag}: {split}:") if lists.get(split) else None for split in SPLITS
    )
    return train, valid, test


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{flag} {path} cannot be read: it is not UTF-8 text") from None
