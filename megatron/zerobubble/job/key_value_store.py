"""The job's key-value store, and how its values are read.

It has no login: whoever reaches its port can write anything there. So no file, process or class is taken from it, and a value
that no rank would write is ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, get_type_hints

from megatron.zerobubble.messages import quoted

__all__ = ["UNREADABLE", "Store", "read_value", "typed"]

_log = logging.getLogger(__name__)

_LARGEST = 1e15
"""Numbers in the store are smaller."""
_LONGEST = 4000
"""Letters of a text that are kept."""

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Raised by what reads values that no rank has written."""

Value = TypeVar("Value")


class Store(Protocol):
    """The methods of torch.distributed's key-value stores that training uses."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if its value is `expected` (or it is unset and `expected` is empty); return its value after."""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key`, which starts at 0; return its value after."""

    def set(self, key: str, value: str) -> None:
        """Set a key to a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are set."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""

    def get(self, key: str) -> bytes:
        """The value of a key."""

    def clone(self) -> Store:
        """The same store over a connection of its own, for another thread."""


def read_value(text: bytes, what: str, make: Callable[[Any], Value]) -> Value | None:
    """A JSON value of the store; None, with a line in the log, if no rank can have written it.

    Args:
        text: as it is in the store.
        what: the value in the log line.
        make: returns the value, given the content of the JSON text; raises for anything else.
    """
    try:
        return make(json.loads(text))
    except UNREADABLE:
        _log.warning("the job's store has, as %s, what no rank writes: %s; it is ignored", what, quoted(text))
        return None


def typed(kind: Callable[..., Value], fields: Mapping[str, Any]) -> Value:
    """Construct a dataclass or named tuple from fields of the declared types, with printable texts and numbers of usual size.

    Raises:
        ValueError: a number is too large.
        TypeError: a field is missing, unknown, or of another type.
    """
    hints, values = get_type_hints(kind), dict(fields)
    for name, value in values.items():
        if not isinstance(value, hints[name]) and not (hints[name] is float and isinstance(value, int)):
            raise TypeError(name)
        if isinstance(value, int | float) and not abs(value) < _LARGEST:
            raise ValueError(name)
        if isinstance(value, str):
            text = value[:_LONGEST]
            values[name] = text if text.replace("\n", "").isprintable() else repr(text)
    return kind(**values)
