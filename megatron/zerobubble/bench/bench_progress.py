"""How far a comparison is: lines with the share done and the time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["BenchProgress", "duration_text"]

_LINE_EVERY_S = 30.0


class BenchProgress:
    """Counts iterations of all blocks, warm-up included, and estimates the time left from those done.

    Args:
        total: iterations of all blocks.
        is_quiet: print nothing: on ranks other than 0.
        stream: where to print; None: standard error.
    """

    def __init__(self, total: int, *, is_quiet: bool, stream: TextIO | None = None) -> None:
        self._total, self._is_quiet = total, is_quiet
        self._stream = sys.stderr if stream is None else stream
        self._done = 0
        self._what = ""
        self._begin = self._printed = time.monotonic()

    def block(self, what: str) -> None:
        """A block begins; `what` names it."""
        self._what = what

    def tick(self) -> None:
        """An iteration has ended. Now and then a line says so."""
        self._done += 1
        if time.monotonic() - self._printed > _LINE_EVERY_S:
            self.say(self._what)

    def skip(self, count: int) -> None:
        """Iterations will not run, because their contender failed."""
        self._total -= count

    def say(self, text: str) -> None:
        """A line with the share done and the time left."""
        if self._is_quiet:
            return
        self._printed = time.monotonic()
        left = self.seconds_left()
        about = "" if left is None else f", about {duration_text(left)} left"
        self._stream.write(f"[{self._done}/{self._total} iterations{about}] {text}\n")
        self._stream.flush()

    def seconds_left(self) -> float | None:
        """Estimated time left; None before the first iteration has ended."""
        if not self._done:
            return None
        return (time.monotonic() - self._begin) / self._done * max(0, self._total - self._done)


def duration_text(seconds: float) -> str:
    """Such as `45 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
