"""Following a search from outside: what it has found so far, and a way to stop it at any time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol


class Stoppable(Protocol):
    """What `Progress` stops: a core, whose annealing ends at the next move with the best so far, or a search's own `Progress`."""

    def stop(self) -> None:
        """End annealing now; may be called from any thread."""


class Progress:
    """Gets reports of one search or of several in turn, and can stop them all.

    A search that is stopped returns the best plan it has found. Which one that is depends on when, unlike that of a search which
    ends by itself.
    """

    def __init__(self, report: Callable[[str, float, float], None] = lambda schedule, best_ms, bound_ms: None) -> None:
        """Take a function of the schedule's name, the best time found so far and its lower bound, both in milliseconds.

        It is called whenever a part of a search ends, from the threads of the search.
        """
        self.report = report
        self._lock = threading.Lock()
        self._followed: list[Stoppable] = []
        self._is_stopped = False

    def several(self, count: int) -> list[Progress]:
        """One for each of some searches for the same plan, which may run at the same time.

        This one gets the best of their times, and stops them all.
        """
        best: dict[str, float] = {}  # by name: a smaller instance has one of its own
        lock = threading.Lock()

        def report(schedule: str, best_ms: float, bound_ms: float) -> None:
            with lock:
                best[schedule] = min(best.get(schedule, math.inf), best_ms)
                self.report(schedule, best[schedule], bound_ms)

        followed = [Progress(report) for _ in range(count)]
        for each in followed:
            self.add(each)
        return followed

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopped

    def add(self, followed: Stoppable) -> None:
        """Stop this, too, when `stop` is called; at once if it was."""
        with self._lock:
            self._followed.append(followed)
        if self._is_stopped:
            followed.stop()

    def stop(self) -> None:
        """End all searches that it follows, now and from now on."""
        with self._lock:
            self._is_stopped = True
            followed = list(self._followed)
        for each in followed:
            each.stop()
