"""--zero-bubble-trace in a stock loop, which does not say when it ends.

The trace is written before the first call of the schedule after the last chosen iteration. Without chosen ones it is written
likewise after each of the early iterations that are recorded, and by `uninstall` once more, for the last recorded one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from megatron.zerobubble.mcore.engine import Engine
from megatron.zerobubble.profiling.recordings import EARLY

__all__ = ["TraceFiles"]


class TraceFiles:
    """Writes the trace of one model. Every rank must construct it before the first iteration, and call it at the same points.

    Args:
        engine: runs the model.
        directory: where rank 0 writes.
    """

    def __init__(self, engine: Engine, directory: str) -> None:
        self._engine, self._recordings = engine, engine.schedule.recordings
        self._directory, self._chosen = directory, engine.options.flags.trace_iterations
        self.finished = 0
        """Number of the last training iteration whose passes ended without an error; the owner sets it."""
        self._written = 0
        """That number when the trace was written."""
        self._drawn: int | None = None
        """Without chosen iterations: the one that rank 0 has written."""

    def is_due(self, *, at_end: bool) -> bool:
        """Whether `write` is to be called now, between two iterations; the same on all ranks.

        Args:
            at_end: whether no iteration follows.
        """
        done, recordings = self.finished, self._recordings
        if done == self._written or done != recordings.begun or recordings.is_empty:
            return False
        if self._chosen:
            last = max(self._chosen)
            return done == last or (at_end and done < last)
        return at_end or done in EARLY

    def write(self) -> None:
        """Write the trace. All ranks must call it; the last step has been validated."""
        self._written = self.finished
        seen = self._engine.report()
        if seen is None or self._chosen:
            return
        if self._drawn not in (None, seen.iteration):
            for name in (f"timeline-{self._drawn}.svg", f"plan-{self._drawn}.json"):
                with contextlib.suppress(OSError):
                    (Path(self._directory) / name).unlink()
        self._drawn = seen.iteration
