"""Watchdog: ends a job that is stuck, and names the rank that holds it up.

When one rank stops, the others wait for it, and for each other, until a process group times out with a message about a socket,
and the rank in that message is seldom the one that stopped. So a thread of every rank, which needs nothing from the main thread,
publishes heartbeats in the job's store (`heartbeats`), listens for those of the next rank, and raises an alarm

- when nothing is heard of the next rank for the time limit: its process is stopped, or gone;
- when what the rank itself does in the passes or the optimizer (`runtime.watch`) does not change for the time limit; in the first
  iteration, because its compilation cannot be distinguished from being stuck, for nine tenths of the distributed timeout;
- when all ranks have waited for each other for the time limit: a message is lost;
- when it waits for other ranks for nine tenths of the distributed timeout: the process groups are about to give up. Not before,
  because the rank that it waits for may be outside of the schedule, for as long as that takes.

A rank that is outside raises no alarm, and may be silent for nine tenths of the distributed timeout (`supervision`).

Whoever raises an alarm reads all heartbeats and names a rank: one that is silent; else one that works and does not wait; else
two that wait for each other. The first to do so records it as the failure of that rank (`failure`). All ranks then log what they
do themselves and exit, the named one first, so that torchrun shows it. Time in which this process was itself stopped does not
count. A rank that has noticed nothing of another one's failure leaves with that one's reason; all leave where the store is gone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType

from megatron.zerobubble.job.error_file import write_error_file
from megatron.zerobubble.job.exit import leave_now
from megatron.zerobubble.job.failure import RankFailure, first_to_fail, is_first_here, who_failed
from megatron.zerobubble.job.heartbeats import Beat, own_start, publish, published, this_host
from megatron.zerobubble.job.key_value_store import Store, answered
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.runtime.threads import start_thread
from megatron.zerobubble.runtime.watch import Doing, Watch

__all__ = ["Watchdog", "culprit"]

_log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""Seconds that a named rank gives the others to log what they do, and that a main thread has to notice another rank's failure."""
_AFTER_REASON_S = 0.5
"""Seconds after which ranks log what they do: below the reason, which one of each machine logs."""
_AFTERWARDS_S = 3.0
"""Seconds that the other ranks wait after the named one has left: torchrun shows the rank that was the first to exit."""
_FIRST_FRACTION = 0.9
"""Time limit of the first iteration, and of waits for ranks outside of the schedule, as a fraction of the distributed timeout."""
_LEAST_UNANSWERED_S = 10.0
"""Seconds that a store may take to answer, at least: its host may be busy."""
_LONGEST_INTERVAL_S = 2.0
"""Seconds between two heartbeats of a rank, at most."""
_LEAST_LOOK_S, _LOOK_BEATS = 2.0, 3.0
"""A rank is silent if it publishes nothing for that time, and for that many heartbeats."""


class Watchdog:
    """One rank's watchdog. A context manager; a daemon thread watches while inside.

    Args:
        watch: receives the main thread's current activity.
        store: the job's store. The thread gets a connection of its own.
        launch: which rank this is, of how many that have a watchdog.
        limit_s: --zero-bubble-watchdog-seconds: how long a rank may spend in one activity, and nothing is heard of it.
        timeout_s: the distributed timeout. Nine tenths of it are the limit during the first iteration and evaluation, for waits
            for other ranks, and of a rank that is outside of the schedule.
        leave: ends the process with an exit code, without exit handlers.
    """

    def __init__(
        self,
        watch: Watch,
        store: Store,
        launch: Launch,
        *,
        limit_s: float,
        timeout_s: float,
        leave: Callable[[int], object] = leave_now,
    ) -> None:
        self._watch, self._store, self._leave = watch, store.clone(), leave
        self._rank, self._world_size, self._error_file = launch.rank, launch.world_size, launch.error_file
        self._next = (launch.rank + 1) % launch.world_size
        self._limit_s, self._patience_s = limit_s, max(limit_s, _FIRST_FRACTION * timeout_s)
        self._interval_s = min(_LONGEST_INTERVAL_S, limit_s / 10.0)
        self._host, self._start = this_host(), own_start()
        self._over, self._soon = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._beat: Beat | None = None
        self._doing: Doing | None = None
        self._heard: Beat | None = None
        """The newest heartbeat of the next rank."""
        self._silent_s = 0.0
        """Seconds since a new one came."""

    def __enter__(self) -> Watchdog:
        self._thread = start_thread(self._run, name="watchdog", device=self._watch.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._soon.set()
        if error is None and self._thread is not None:  # after an error the process ends
            self._thread.join(_GRACE_S)

    def beat_now(self) -> None:
        """Publish at once what this rank does: something that takes another limit than before."""
        self._soon.set()

    def _run(self) -> None:
        """Publish and listen until the end, or until a rank has failed or holds up the job."""
        looked, answer_s = time.monotonic(), max(self._limit_s, _LEAST_UNANSWERED_S)
        while not self._over.is_set():
            now = time.monotonic()
            passed_s, looked = min(now - looked, 2.0 * self._interval_s), now  # more than that: the process was stopped
            beat = self._next_beat(passed_s)
            try:
                failure = answered(partial(self._exchange, beat, passed_s), answer_s)
            except RuntimeError:
                self._lose_store(answer_s - (time.monotonic() - now))
                return
            if failure is not None:
                self._follow(failure, beat)
                return
            self._soon.wait(self._interval_s)
            self._soon.clear()
        with suppress(RuntimeError):  # the store is gone, and so is the job
            publish(self._store, self._rank, self._next_beat(0.0)._replace(is_last=True))

    def _exchange(self, beat: Beat, passed_s: float) -> RankFailure | None:
        """Publish a heartbeat and listen for the next rank's.

        Args:
            beat: this rank's.
            passed_s: seconds since the last call.

        Returns:
            The rank that has failed or holds up the job, if that is known now.
        """
        publish(self._store, self._rank, beat)
        failure = who_failed(self._store)
        heard = published(self._store, [self._next]).get(self._next)
        is_news = self._next == self._rank or (heard is not None and (heard.is_last or heard != self._heard))
        self._heard, self._silent_s = heard, 0.0 if is_news else self._silent_s + passed_s
        if failure is None and self._is_due(beat):
            failure = first_to_fail(self._store, self._decide())
        return failure

    def _next_beat(self, passed_s: float) -> Beat:
        doing, before = self._watch.current(), self._beat
        still_s = 0.0 if before is None or doing is not self._doing else before.still_s + passed_s
        beat = Beat(
            number=1 if before is None else before.number + 1,
            host=self._host,
            pid=os.getpid(),
            start=self._start,
            interval_s=self._interval_s,
            doing=None if doing is None else doing.text,
            place=_place(),
            still_s=still_s,
            is_waiting=doing is not None and doing.is_waiting,
            waits_for=None if doing is None else doing.waits_for,
        )
        self._doing, self._beat = doing, beat
        return beat

    def _is_due(self, beat: Beat) -> bool:
        """Whether this rank raises the alarm."""
        doing, heard = self._doing, self._heard
        if doing is None:
            return False
        is_outside = heard is None or heard.doing is None
        if self._silent_s >= (self._patience_s if is_outside else self._limit_s):
            return True
        if doing.is_waiting:
            return beat.still_s >= self._patience_s or (beat.still_s >= self._limit_s and self._all_wait())
        return doing.is_limited and beat.still_s >= (self._patience_s if doing.is_first else self._limit_s)

    def _all_wait(self) -> bool:
        """Whether all ranks have waited for others for so long that none can be at work; no if the next rank does not wait."""
        if self._heard is not None and not self._heard.is_waiting:
            return False
        beats = published(self._store, range(self._world_size))
        return len(beats) == self._world_size and all(
            beat.is_last or (beat.is_waiting and beat.still_s >= self._limit_s / 2.0) for beat in beats.values()
        )

    def _decide(self) -> RankFailure:
        """The rank that holds up the job, or that has failed meanwhile."""
        ranks = range(self._world_size)
        before = published(self._store, ranks)
        until = time.monotonic() + max(_LEAST_LOOK_S, _LOOK_BEATS * self._interval_s)
        while (left_s := until - time.monotonic()) > 0.0:  # a rank that looks at the same time must not find this one silent
            time.sleep(min(left_s, self._interval_s))
            publish(self._store, self._rank, self._next_beat(self._interval_s))
        beats = published(self._store, ranks)
        silent = [rank for rank, beat in beats.items() if beat == before.get(rank) and not beat.is_last and rank != self._rank]
        silent.sort(key=lambda rank: rank != self._next or self._silent_s < self._limit_s / 2.0)  # others may only be late
        failed = who_failed(self._store)
        return failed or culprit(beats, silent, world_size=self._world_size, least_still_s=self._limit_s / 2.0)

    def _follow(self, failure: RankFailure, beat: Beat) -> None:
        """End this rank after another one's failure, or because a rank holds up the job; `beat` is its own last one."""
        if not failure.is_hang:
            if self._over.wait(_GRACE_S):
                return  # the main thread has noticed it
            _log.error("rank %d stops: %s", self._rank, failure.line)
            if failure.host != self._host:
                write_error_file(self._error_file, failure.line)
        else:
            if is_first_here(self._store, self._host):
                _log.error("stuck: %s (--zero-bubble-watchdog-seconds %g)", failure.line, self._limit_s)
            else:
                time.sleep(_AFTER_REASON_S)
            _log.error("stuck: rank %d %s", self._rank, _position(beat))
            write_error_file(self._error_file, failure.line)
            time.sleep(_GRACE_S if failure.rank == self._rank else _GRACE_S + _AFTERWARDS_S)
        self._end()

    def _lose_store(self, seconds: float) -> None:
        """End this rank, if it is in a call, some seconds after the store was lost: others may end it before."""
        if self._over.wait(max(0.0, seconds)) or self._watch.current() is None:
            return
        reason = (
            f"the job's store does not answer rank {self._rank}: the machine or process that hosts it (torchrun on "
            "MASTER_ADDR, or rank 0) is stopped or gone"
        )
        _log.error("stuck: %s", reason)
        write_error_file(self._error_file, reason)
        self._end()

    def _end(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._leave(1)


def culprit(beats: Mapping[int, Beat], silent: Collection[int], *, world_size: int, least_still_s: float) -> RankFailure:
    """The rank that holds up a job in which nothing goes on.

    Args:
        beats: the last heartbeat of each rank that ever published one.
        silent: ranks whose heartbeats have ended; the first is named.
        world_size: ranks of the job.
        least_still_s: a rank that has done the same for less time than this, in seconds, is not stuck.
    """
    missing = [rank for rank in range(world_size) if rank not in beats]
    working = [rank for rank, beat in sorted(beats.items()) if not beat.is_waiting and beat.still_s >= least_still_s]
    if silent:
        rank, *others = silent
        beat = beats[rank]
        doing = "" if beat.doing is None else f"; when last heard of, it {beat.doing}{beat.place}"
        line = f"rank {rank} ({beat.process}) is silent: it is stopped, or its machine is gone{doing}{_also([*others, *missing])}"
    elif missing:
        rank, *others = missing
        line = f"rank {rank} has not called the schedule{_also(others)}"
    elif working:
        rank, *others = sorted(working, key=lambda each: (beats[each].doing is None, -beats[each].still_s))
        also = "".join(f"; rank {each} {_position(beats[each])}" for each in others[:3] if beats[each].doing is not None)
        line = f"rank {rank} makes no progress: it {_position(beats[rank])}{also}"
    else:
        rank, line = _lost_between(beats)
    host = beats[rank].host if rank in beats else ""
    return RankFailure(rank, line, host, is_hang=True)


def _lost_between(beats: Mapping[int, Beat]) -> tuple[int, str]:
    """A rank to name where all wait, and the line."""
    for rank, beat in sorted(beats.items()):
        other = beat.waits_for
        if other is not None and other in beats and beats[other].waits_for == rank:
            pair = f"rank {rank} {_position(beat)}; rank {other} {_position(beats[other])}"
            return rank, f"ranks {rank} and {other} wait for each other, so a message between them is lost: {pair}"
    rank = max(sorted(beats), key=lambda each: beats[each].still_s)
    return rank, f"every rank waits for others, first rank {rank}: it {_position(beats[rank])}"


def _position(beat: Beat) -> str:
    return f"{beat.doing or 'is outside of the passes'}, for {beat.still_s:.1f} s{beat.place}"


def _also(ranks: Collection[int]) -> str:
    if not ranks:
        return ""
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"; the same is true of rank{'s' if len(ranks) > 1 else ''} {shown}"


def _place() -> str:
    """The main thread's innermost Python function, its file and line; empty if there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    return f" (in {frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
