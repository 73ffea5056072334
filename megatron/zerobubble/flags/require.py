"""Range checks that many flags share. Each raises a ConfigError of one line: the flag, its value, what is allowed."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import flag_of
from megatron.zerobubble.messages import quoted, shown

__all__ = ["at_most", "installed", "not_negative", "of_types", "one_of", "positive", "refuse"]


def installed(what: str, *modules: str) -> None:
    """Raise ConfigError unless modules can be imported that `what` needs, and that the extra `train` brings."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise ConfigError(
            f"{what} needs {names}, which {'is' if len(missing) == 1 else 'are'} not installed: pip install '.[train]' in a "
            "checkout of megatron-zerobubble"
        )


def of_types(config: Any, *, meant: Callable[[str], str | None]) -> None:
    """Raise ConfigError unless each field of a config has its type, or is one of its words: programs write configs, too.

    Args:
        config: whose fields are bool, int, float, str and Literal, or None.
        meant: what a word was probably meant to be, for the message.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        words: list[str] = []
        types: list[type] = []
        for part in (hint,) if typing.get_origin(hint) is Literal else typing.get_args(hint) or (hint,):
            is_literal = typing.get_origin(part) is Literal
            words += typing.get_args(part) if is_literal else ()
            types.append(str if is_literal else part)
        if type(value) not in types and not (type(value) is int and float in types):
            wanted = " or ".join(each.__name__ for each in types if each is not type(None))
            raise ConfigError(f"{field.name} is {quoted(value)}, of type {type(value).__name__}; give {wanted}")
        if words and value is not None:
            one_of(value, words, flag_of(field.name), meant=meant(value))


def positive(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of a config is finite and above zero; None (not given) passes."""
    for flag, value in _given(config, names):
        if not value > 0:
            raise ConfigError(f"{flag} {shown(value)} must be greater than 0")
        _check_finite(flag, value)


def not_negative(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of a config is finite and not below zero; None (not given) passes."""
    for flag, value in _given(config, names):
        if not value >= 0:
            raise ConfigError(f"{flag} {shown(value)} must not be negative")
        _check_finite(flag, value)


def at_most(config: Any, most: int, *names: str) -> None:
    """Raise ConfigError if a named field of a config is above `most`; None (not given) passes."""
    for flag, value in _given(config, names):
        if value > most:
            raise ConfigError(f"{flag} {shown(value)} is too large; give at most {most:,}")


def one_of(value: str, allowed: Sequence[str], flag: str, *, meant: str | None = None) -> None:
    """Raise ConfigError unless `value`, given for `flag`, is one of `allowed`; `meant` was probably meant."""
    if value not in allowed:
        hint = f"; did you mean {meant}?" if meant in allowed else ""
        raise ConfigError(f"{flag} {quoted(value)} is unknown; choose from {', '.join(allowed)}{hint}")


def refuse(subject: str, problems: Mapping[str, object]) -> None:
    """Raise ConfigError, `subject` and the problem, for the first of `problems` that is true."""
    for problem, is_given in problems.items():
        if is_given:
            raise ConfigError(f"{subject} {problem}")


def _check_finite(flag: str, value: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{flag} {value} must be a finite number")


def _given(config: Any, names: Sequence[str]) -> list[tuple[str, Any]]:
    values = [(flag_of(name), getattr(config, name)) for name in names]
    return [(flag, value) for flag, value in values if value is not None]
