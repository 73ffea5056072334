"""Watchdog: ends a job that is stuck, after every rank has logged what it is doing or waiting for.

When one rank of a pipeline stops, the others wait for it, and for each other, until a process group times out with a message
about a socket. So a thread on each rank watches whether the rank's current activity (see `runtime.watch`) still changes. The
first thread that sees no change for too long records that in the job's store; the others find it there, each logs its rank's
activity, and once all have logged, or after some seconds, they exit.

The thread needs nothing from the main thread, which may be inside a wait in C++ (such waits release the GIL). Time in which the
whole process was stopped does not count. Outside of the passes (evaluation data, checkpoints, planning, waiting for other ranks
to do these) there is no limit. The first iteration may take nine tenths of the distributed timeout, because its compilation
cannot be distinguished from being stuck.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from megatron.zerobubble.runtime.threads import start_thread
from megatron.zerobubble.runtime.watch import Doing, Watch
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.initialize import Job
from megatron.zerobubble.training.resilience.failure import Store, first_to_fail

__all__ = ["Watchdog", "watchdog"]

_log = logging.getLogger(__name__)

_STUCK, _REPORTED = "stuck", "stuck/reported"
_GRACE_S = 5.0
"""Seconds that ranks which have reported wait for those that have not."""
_FIRST_FRACTION = 0.9
"""Time limit of the first iteration, as a fraction of the distributed timeout."""


def watchdog(settings: Settings, job: Job, watch: Watch | None) -> AbstractContextManager[object]:
    """The watchdog of --zero-bubble-watchdog-seconds, as a context manager; an inert one without `watch`."""
    if watch is None or settings.watchdog_s is None:
        return nullcontext()
    return Watchdog(
        watch,
        job.store.clone(),  # a connection of its own: the main thread may be inside a wait on the other one
        rank=job.launch.rank,
        world_size=job.launch.world_size,
        limit_s=settings.watchdog_s,
        first_limit_s=max(settings.watchdog_s, _FIRST_FRACTION * 60.0 * settings.parallel.distributed_timeout_minutes),
    )


class Watchdog:
    """One rank's watchdog. A context manager; a daemon thread watches while inside.

    Args:
        watch: receives the main thread's current activity.
        store: the job's store, over a connection that no other thread uses.
        rank: this rank.
        world_size: number of ranks that have a watchdog.
        limit_s: seconds that a rank may spend in one activity.
        first_limit_s: the same during the first iteration and evaluation.
        leave: ends the process with an exit code, without exit handlers.
    """

    def __init__(
        self,
        watch: Watch,
        store: Store,
        *,
        rank: int,
        world_size: int,
        limit_s: float,
        first_limit_s: float,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._watch, self._store, self._leave = watch, store, leave
        self._rank, self._world_size = rank, world_size
        self._limit_s, self._first_limit_s = limit_s, first_limit_s
        self._interval_s = min(1.0, limit_s / 10.0)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        self._thread = start_thread(self._look, name="watchdog", device=self._watch.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        # After an error the process ends, and what this thread is in the middle of does not matter.
        if error is None and self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        """The thread: measure for how long the rank's activity has not changed, until the end of the run."""
        before, still_s, looked = self._watch.current(), 0.0, time.monotonic()
        while not self._over.wait(self._interval_s):
            doing, now = self._watch.current(), time.monotonic()
            passed_s = min(now - looked, 2.0 * self._interval_s)  # more only if this process was stopped
            still_s = still_s + passed_s if doing is before else 0.0
            before, looked = doing, now
            limit_s = self._first_limit_s if doing is not None and doing.is_first else self._limit_s
            is_stuck = doing is not None and still_s >= limit_s
            if is_stuck or (still_s >= self._limit_s / 2.0 and self._somebody_is_stuck()):
                self._report(doing, still_s)
                return

    def _somebody_is_stuck(self) -> bool:
        try:
            return self._store.check([_STUCK])
        except RuntimeError:  # the store is gone, and so is the job: the rank that ended it has reported why
            return False

    def _report(self, doing: Doing | None, still_s: float) -> None:
        try:
            self._store.compare_set(_STUCK, "", str(self._rank))
            first = int(self._store.get(_STUCK))
            first_to_fail(self._store, self._rank)
        except RuntimeError:
            first = self._rank
        what = "is idle, outside of the passes" if doing is None else doing.text
        why = f"rank {first} made no progress for too long (--zero-bubble-watchdog-seconds {self._limit_s:g})"
        _log.error("stuck: rank %d %s, for %.1f s%s; %s", self._rank, what, still_s, _place(), why)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._wait_for_others()
        self._leave(1)

    def _wait_for_others(self) -> None:
        """Wait until every rank has reported: torchrun ends the others at the first exit code."""
        until = time.monotonic() + _GRACE_S
        try:
            num_reported = self._store.add(_REPORTED, 1)
            while num_reported < self._world_size and time.monotonic() < until:
                time.sleep(0.1)
                num_reported = self._store.add(_REPORTED, 0)
        except RuntimeError as error:
            _log.error("rank %d lost the job's store: %s", self._rank, error)


def _place() -> str:
    """The Python function, file and line of the main thread, for the report; empty if it is gone."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f" (in {innermost.name}, {os.path.basename(innermost.filename)}:{innermost.lineno})"
