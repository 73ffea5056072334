"""--zero-bubble-trace in a stock loop, which does not say when it ends.

The trace is written before the first call of the schedule after the last chosen iteration. Without chosen ones it is written
likewise after each of the early iterations that are recorded, and by `uninstall` once more, for the last recorded one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from megatron.zerobubble.mcore.replanner import Replanner
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.profiling.recordings import EARLY
from megatron.zerobubble.profiling.trace_report import report_pipeline

__all__ = ["TraceFiles"]


class TraceFiles:
    """Writes the trace of one model. Every rank must construct it before the first iteration, and call it at the same points.

    Args:
        schedule: runs the model.
        replanner: has measured costs and memory, if iterations are profiled.
        directory: where rank 0 writes.
        chosen: iterations to record, from 1; none: the last recorded one.
    """

    def __init__(
        self, schedule: PipelineSchedule, replanner: Replanner | None, *, directory: str, chosen: frozenset[int]
    ) -> None:
        self._schedule, self._replanner = schedule, replanner
        self._directory, self._chosen = directory, chosen
        self.finished = 0
        """Number of the last training iteration whose passes ended without an error; the owner sets it."""
        self._written = 0
        """That number when the trace was written."""
        self._drawn: int | None = None
        """Without chosen iterations: the one that rank 0 has written."""
        schedule.recordings.choose(chosen, done=0)

    def is_due(self, *, at_end: bool) -> bool:
        """Whether `write` is to be called now, between two iterations; the same on all ranks.

        Args:
            at_end: whether no iteration follows.
        """
        done, recordings = self.finished, self._schedule.recordings
        if done == self._written or done != recordings.begun or recordings.is_empty:
            return False
        if self._chosen:
            last = max(self._chosen)
            return done == last or (at_end and done < last)
        return at_end or done in EARLY

    def write(self) -> None:
        """Write the trace. All ranks must call it; the last step has been validated."""
        self._written = self.finished
        replanner = self._replanner
        seen = report_pipeline(
            self._schedule,
            self._directory,
            chosen=self._chosen,
            memory=None if replanner is None else replanner.memory,
            activations=None if replanner is None else replanner.activations,
            by_length=None if replanner is None else replanner.by_length,
        )
        if seen is None or self._chosen:
            return
        if self._drawn not in (None, seen.iteration):
            for name in (f"timeline-{self._drawn}.svg", f"plan-{self._drawn}.json"):
                with contextlib.suppress(OSError):
                    (Path(self._directory) / name).unlink()
        self._drawn = seen.iteration
