"""Leaving before the last iteration, all ranks at the same one and none waiting for another.

Whether a signal came or time is up, each rank sees for itself and at its own moment. The first to see it at the end of an
iteration writes the number of the next one into the job's store, and every rank looks there at the end of each iteration. That
all see it in time needs no barrier: an iteration's gradients come from every rank, so none ends the next iteration before all
have begun it, and whoever wrote had written by then.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from megatron.zerobubble.training.resilience.failure import Store

__all__ = ["EarlyExit"]

_KEY = "early_exit"


class EarlyExit:
    """One rank's look at whether to leave.

    Args:
        store: the job's store.
        handles_signal: leave on SIGTERM, which then no longer ends the process.
        after_minutes: leave when so much time has passed since now; None: never.
    """

    def __init__(self, store: Store, *, handles_signal: bool, after_minutes: float | None) -> None:
        self._store = store
        self._until_s = None if after_minutes is None else time.monotonic() + 60.0 * after_minutes
        self._is_signalled = False
        self._watches = handles_signal or after_minutes is not None
        self._earlier: Any = signal.signal(signal.SIGTERM, self._on_signal) if handles_signal else None
        self.is_urgent = False
        """Whether whoever asks to leave will not wait long."""

    def is_due(self, iteration: int) -> bool:
        """Whether to leave at the end of this iteration. Every rank must ask at the end of every iteration."""
        if not self._watches:
            return False
        if self._is_signalled or (self._until_s is not None and time.monotonic() >= self._until_s):
            self._store.compare_set(_KEY, "", f"{iteration + 1} {'signal' if self._is_signalled else 'time'}")
        if not self._store.check([_KEY]):
            return False
        agreed, reason = self._store.get(_KEY).decode().split()
        if iteration < int(agreed):
            return False  # and not urgent yet: ranks that look later have not seen it
        self.is_urgent = reason == "signal"
        return True

    def close(self) -> None:
        """Let SIGTERM do what it did before."""
        if self._earlier is not None:
            signal.signal(signal.SIGTERM, self._earlier)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
