"""Values in messages: at most 80 characters of each, and in one line. Every message that repeats what was given uses these.

What was given may be a file's whole content, a number of 5,000 digits, which Python refuses to print, or text that ends the line
or that the terminal cannot encode. The beginning and the end of a long value are kept: of a path both matter.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["MOST_SHOWN", "closest", "one_line", "parse_json", "quoted", "shown"]

MOST_SHOWN = 80
"""Most characters of a value in a message."""

_TAIL = 24
_RUN = re.compile(rf"\S{{{MOST_SHOWN + 1},}}")


def shown(value: object) -> str:
    """`str(value)` in one line of at most 80 characters: the middle of a longer text is left out, unprintable letters escaped."""
    try:
        return _cut(str(value))
    except (ValueError, RecursionError):  # an int of more than 4,300 digits; deep nesting
        return f"a {type(value).__name__} that is too large to print"


def quoted(value: object) -> str:
    """`repr(value)`, likewise."""
    try:
        return _cut(repr(value))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too large to print"


def closest(word: str, names: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """The name that was probably meant: one with two neighboring letters swapped first, then the most similar, if any is."""
    word = shown(word).lower()
    swapped = {word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(len(word) - 1)}
    meant = [name for name in names if name in swapped] or difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return meant[0] if meant else None


def one_line(message: str, given: Iterable[str] = ()) -> str:
    """A message in one line, with long values in it cut as by `shown`.

    Args:
        message: any text; every run of white space becomes one space.
        given: values that it may repeat, such as the words of a command line. Others are cut if they have no spaces.
    """
    for value in sorted({*given}, key=len, reverse=True):
        if shown(value) != value:
            message = message.replace(repr(value), quoted(value)).replace(value, shown(value))
    return _printable(_RUN.sub(lambda run: shown(run[0]), " ".join(message.split())))


def parse_json(text: str | bytes, source: str, error: type[Exception]) -> Any:
    """The content of a JSON text. Raises `error` with the name of its source if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except ValueError as reason:  # also a number of more than 4,300 digits
        raise error(f"{source} is not JSON: {reason}") from None
    except RecursionError:
        raise error(f"{source} is JSON that is nested too deeply") from None


def _cut(text: str) -> str:
    if len(text) > MOST_SHOWN:  # first, so that only a few letters are looked at
        text = _joined(text)
    text = _printable(text)
    return _joined(text) if len(text) > MOST_SHOWN else text


def _joined(text: str) -> str:
    return f"{text[: MOST_SHOWN - _TAIL - 3]}...{text[-_TAIL:]}"


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode() for letter in text
    )
