"""Range checks that many flags share. Each raises a ConfigError of one line: the flag, its value, what is allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.flags import flag_of

__all__ = ["not_negative", "one_of", "positive", "within"]


def positive(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of a config is above zero; None (not given) passes."""
    for flag, value in _given(config, names):
        if not value > 0:
            raise ConfigError(f"{flag} {value} must be greater than 0")


def not_negative(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of a config is zero or above; None (not given) passes."""
    for flag, value in _given(config, names):
        if not value >= 0:
            raise ConfigError(f"{flag} {value} must not be negative")


def within(config: Any, low: float, high: float, *names: str) -> None:
    """Raise ConfigError unless each named field of a config is in [low, high); None (not given) passes."""
    for flag, value in _given(config, names):
        if not low <= value < high:
            raise ConfigError(f"{flag} {value} must be at least {low:g} and less than {high:g}")


def one_of(value: str, allowed: Sequence[str], flag: str) -> None:
    """Raise ConfigError unless `value`, given for `flag`, is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{flag} {value!r} is unknown; choose from {', '.join(allowed)}")


def _given(config: Any, names: Sequence[str]) -> list[tuple[str, Any]]:
    flags = {field.name: flag_of(field) for field in dataclasses.fields(config)}
    values = [(flags[name], getattr(config, name)) for name in names]
    return [(flag, value) for flag, value in values if value is not None]
