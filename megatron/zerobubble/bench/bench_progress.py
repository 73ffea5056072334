"""How far a comparison is: a bar in a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

__all__ = ["BenchProgress", "duration_text"]

_LINE_EVERY_S = 30.0


class BenchProgress:
    """Counts iterations of all blocks, warm-up included, and estimates the time left from those done. Enter it.

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
        self._bar: Any | None = None

    def __enter__(self) -> BenchProgress:
        if not self._is_quiet and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="it", desc="bench", file=self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def block(self, what: str) -> None:
        """A block begins; `what` names it."""
        self._what = what
        if self._bar is not None:
            self._bar.set_description(what)

    def tick(self) -> None:
        """An iteration has ended. In a log, a line now and then."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(1)
        elif time.monotonic() - self._printed > _LINE_EVERY_S:
            self.say(self._what)

    def skip(self, count: int) -> None:
        """Iterations will not run, because their contender failed."""
        self._total -= count
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()

    def say(self, text: str) -> None:
        """A line with the share done and the time left."""
        if self._is_quiet:
            return
        self._printed = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
            return
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
