"""Early exit on preemption (SIGTERM) and time limits: all ranks stop after the same iteration, without a barrier.

Each rank notices a signal or the time limit at its own moment. The first rank that notices writes, at the end of an iteration,
the number of the next iteration into the job's store, and every rank reads the store at the end of each iteration. No barrier is
needed: an iteration's gradients depend on every rank, so no rank ends the next iteration before all have started it, and the
number was written before the writer started it.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from types import FrameType
from typing import Any

from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.messages import quoted

__all__ = ["EarlyExit"]

_log = logging.getLogger(__name__)

_KEY = "early_exit"


class EarlyExit:
    """Decides on one rank whether to exit before the last iteration.

    Args:
        store: the job's store.
        handles_signal: exit on SIGTERM; a handler is installed, so the signal no longer ends the process at once.
        after_minutes: time limit in minutes, from now; None: no limit.
    """

    def __init__(self, store: Store, *, handles_signal: bool, after_minutes: float | None) -> None:
        self._store = store
        self._until_s = None if after_minutes is None else time.monotonic() + 60.0 * after_minutes
        self._is_signalled = False
        self._watches = handles_signal or after_minutes is not None
        self._earlier: Any = signal.signal(signal.SIGTERM, self._on_signal) if handles_signal else None
        self.is_urgent = False
        """Whether the exit is due to SIGTERM, so that little time is left: skip the final evaluation."""

    def is_due(self, iteration: int) -> bool:
        """Whether to exit after this iteration. Every rank must call it at the end of every iteration; all agree."""
        if not self._watches:
            return False
        if self._is_signalled or (self._until_s is not None and time.monotonic() >= self._until_s):
            self._store.compare_set(_KEY, "", f"{iteration + 1} {'signal' if self._is_signalled else 'time'}")
        if not self._store.check([_KEY]):
            return False
        text = self._store.get(_KEY)
        found = re.fullmatch(rb"(\d{1,15}) (signal|time)", text)
        if found is None:
            _log.warning("early exit is off: the job's store has, as its iteration, what no rank writes: %s", quoted(text))
            self._watches = False
        if found is None or iteration < int(found[1]):
            return False  # nor urgent yet: ranks that are behind have not read it
        self.is_urgent = found[2] == b"signal"
        return True

    def close(self) -> None:
        """Restore the previous handler of SIGTERM."""
        if self._earlier is not None:
            signal.signal(signal.SIGTERM, self._earlier)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
