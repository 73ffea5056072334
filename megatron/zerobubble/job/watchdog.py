"""Watchdog: ends a job that is stuck, and names the rank that holds it up, from the first rendezvous to the end.

When one rank stops, the others wait for it, and for each other, until a process group times out with a message about a socket,
and the rank in that message is seldom the one that stopped. So every rank has two threads that need nothing from its main thread.
One publishes heartbeats in the job's store (`heartbeats`, `pulse`): that the rank runs, what it is doing, and since when; it also
listens for those of the next rank. The other one raises the alarm

- when nothing is heard of the next rank for the time limit, in any phase: its process is stopped, or gone;
- when the rank's own activity in the passes or the optimizer (`runtime.watch`) does not change for the time limit; in the first
  iteration, because its compilation cannot be distinguished from being stuck, for nine tenths of the distributed timeout;
- when all ranks have waited for each other for the time limit, in any phase: a message is lost;
- when it waits for other ranks for nine tenths of the distributed timeout: the process groups are about to give up. Not before,
  because the rank that it waits for may be in a phase that takes as long as it takes;
- when the store does not answer for the time limit: its host is gone.

A rank that has noticed nothing of another one's failure, because it waits for something else, leaves with that rank's reason.

A rank of which nothing is known, because it is outside of all phases, raises no alarm, and may be silent for nine tenths of the
distributed timeout: that is a training loop that is not ours, between its calls of the schedule (`supervision`).

Whoever is first reads all beats, names the rank that holds up the job (`verdict`), and writes that into the store. All ranks log
their own position and exit, the named one first, so that torchrun shows it. A rank that is stopped is killed by another one of
its machine: torchrun would wait half a minute for it. Time in which this process was itself stopped does not count.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from megatron.zerobubble.job.answering_store import answering
from megatron.zerobubble.job.error_file import write_error_file
from megatron.zerobubble.job.exit import leave_now
from megatron.zerobubble.job.failure import RankFailure, first_to_fail, who_failed
from megatron.zerobubble.job.heartbeats import Beat, published, this_process
from megatron.zerobubble.job.key_value_store import Store, read_value, typed
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.job.pulse import Pulse, Stillness
from megatron.zerobubble.job.siblings import kill_if_stopped, write_beside
from megatron.zerobubble.job.verdict import HangVerdict, decide
from megatron.zerobubble.runtime.threads import start_thread
from megatron.zerobubble.runtime.watch import Doing, Watch

__all__ = ["Watchdog"]

_log = logging.getLogger(__name__)

_STUCK, _VERDICT, _REPORTED = "stuck", "stuck/verdict", "stuck/reported"
_GRACE_S = 5.0
"""Seconds that ranks wait for a verdict, those that have reported for the others, and after a failure of another rank."""
_AFTERWARDS_S = 3.0
"""Seconds that the other ranks wait after the named one has left: torchrun shows the rank that was the first to exit."""
_FIRST_FRACTION = 0.9
"""Time limit of the first iteration, and of waits outside of the passes, as a fraction of the distributed timeout."""
_LEAST_UNANSWERED_S = 10.0
"""Seconds that a store may take to answer, at least: its host may be busy."""
_LONGEST_INTERVAL_S = 2.0
"""Seconds between two beats of a rank, at most."""


class Watchdog:
    """One rank's watchdog. A context manager; two daemon threads watch while inside.

    Args:
        watch: receives the main thread's current activity.
        store: the job's store. Each thread gets a connection of its own.
        launch: which rank this is, of how many that have a watchdog.
        limit_s: --zero-bubble-watchdog-seconds: how long a rank may spend in one activity, and nothing is heard of it.
        timeout_s: the distributed timeout. Nine tenths of it are the limit during the first iteration and evaluation, until a
            rank joins the job, for waits for other ranks, and of a rank of which nothing is known.
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
        self._watch, self._leave = watch, leave
        self._store = answering(store.clone(), max(limit_s, _LEAST_UNANSWERED_S))
        self._rank, self._world_size, self._error_file = launch.rank, launch.world_size, launch.error_file
        self._limit_s, self._first_limit_s = limit_s, max(limit_s, _FIRST_FRACTION * timeout_s)
        self._interval_s = min(1.0, limit_s / 10.0)
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stillness = Stillness(watch)
        self._pulse = Pulse(
            store.clone(),
            rank=launch.rank,
            world_size=launch.world_size,
            interval_s=min(_LONGEST_INTERVAL_S, limit_s / 10.0),
            watch=watch,
            stillness=self._stillness,
            alarm_key=_STUCK,
            long_s=limit_s / 2.0,
        )

    def __enter__(self) -> Watchdog:
        for function, name in ((self._look, "watchdog"), (lambda: self._pulse.run(self._over), "beats")):
            self._threads.append(start_thread(function, name=name, device=self._watch.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._pulse.soon.set()
        # After an error the process ends, and what the threads are in the middle of does not matter.
        if error is None:
            for thread in self._threads:
                thread.join(_GRACE_S)

    def beat_now(self) -> None:
        """Say at once what this rank does: something that takes another limit than before."""
        self._pulse.soon.set()

    def _look(self) -> None:
        """The thread that raises the alarm, or follows one, until the end of the run."""
        failed_s = 0.0
        while not self._over.wait(self._interval_s):
            doing, still_s = self._stillness.look(self._interval_s)
            self._pulse.unanswered_s += self._interval_s
            if doing is not None and self._pulse.unanswered_s >= max(self._limit_s, _LEAST_UNANSWERED_S):
                self._leave_without_store()
                return
            failed_s = 0.0 if self._pulse.failure is None else failed_s + self._interval_s
            if self._pulse.failure is not None and failed_s >= _GRACE_S:
                self._follow(self._pulse.failure)
                return
            if self._pulse.is_alarm or self._is_due(doing, still_s) or self._all_wait(still_s):
                self._alarm(doing, still_s)
                return

    def _is_due(self, doing: Doing | None, still_s: float) -> bool:
        """Whether this rank raises the alarm."""
        pulse = self._pulse
        if doing is None:
            return False
        if pulse.next_silent_s >= (self._limit_s if pulse.next_is_known else self._first_limit_s):
            return True
        if doing.is_limited and not (doing.is_first or pulse.depends):
            return still_s >= self._limit_s
        return still_s >= self._first_limit_s and (doing.is_limited or pulse.depends)

    def _all_wait(self, still_s: float) -> bool:
        """Whether this rank, and then all others, have depended on others for so long that none can be at work."""
        if still_s < self._limit_s or not (self._pulse.depends and self._pulse.next_depends):
            return False
        try:
            beats = published(self._store, range(self._world_size))
        except RuntimeError:  # the store is gone; `Pulse.unanswered_s` tells for how long
            return False
        return len(beats) == self._world_size and all(
            beat.is_last or (beat.depends_on_others and beat.still_s >= self._limit_s / 2.0) for beat in beats.values()
        )

    def _alarm(self, doing: Doing | None, still_s: float) -> None:
        """Log who holds up the job and what this rank is doing, and end the process."""
        try:
            verdict = self._agree()
            if self._store.add(f"{_STUCK}/told on {this_process().host}", 1) == 1:
                _log.error("stuck: %s (--zero-bubble-watchdog-seconds %g)", verdict.reason, self._limit_s)
            what = "is outside of the passes" if doing is None else doing.text
            _log.error("stuck: rank %d %s, for %.1f s%s", self._rank, what, still_s, self._pulse.place)
            self._end(verdict)
        except RuntimeError as error:
            _log.error("rank %d lost the job's store: %s", self._rank, error)
            self._leave(1)

    def _agree(self) -> HangVerdict:
        """The rank that holds up the job, the same on all ranks: named by the first one that raises the alarm."""
        if self._store.compare_set(_STUCK, "", str(self._rank)) == str(self._rank).encode():
            verdict = self._decide()
            beat = published(self._store, [verdict.rank]).get(verdict.rank)
            process = this_process() if beat is None else beat.process
            first_to_fail(self._store, RankFailure(verdict.rank, verdict.reason, process.host))
            self._store.set(_VERDICT, json.dumps(verdict._asdict()))
        until = time.monotonic() + _GRACE_S + 3.0 * self._pulse.interval_s
        while not self._store.check([_VERDICT]) and time.monotonic() < until:
            time.sleep(0.05)
        found = None
        if self._store.check([_VERDICT]):
            found = read_value(self._store.get(_VERDICT), "the alarm's reason", lambda fields: typed(HangVerdict, fields))
        return found or HangVerdict(rank=self._rank, reason=f"rank {self._rank} waited for the reason in vain")

    def _decide(self) -> HangVerdict:
        """Look at all beats twice: those of a rank that is stopped do not change."""
        ranks = range(self._world_size)
        before = published(self._store, ranks)
        time.sleep(2.5 * self._pulse.interval_s)
        beats = published(self._store, ranks)
        failed = who_failed(self._store)
        if failed is not None:
            return HangVerdict(failed.rank, failed.line)
        return decide(
            beats,
            silent_s=self._silent_s(before, beats),
            world_size=self._world_size,
            least_still_s=self._limit_s / 2.0,
            waited_s=self._pulse.next_silent_s,
        )

    def _silent_s(self, before: dict[int, Beat], beats: dict[int, Beat]) -> dict[int, float]:
        """For how long nothing was heard of the ranks that published nothing new between two looks.

        On a busy machine a beat may be late: a rank is silent if the one that listens to it has heard nothing for half the limit,
        or if that one is silent itself.
        """
        quiet = [
            rank
            for rank, beat in beats.items()
            if rank != self._rank and rank in before and before[rank].count == beat.count and not beat.is_last
        ]
        silent_s: dict[int, float] = {}
        for _ in quiet:  # as often as a row of silent ranks is long
            for rank in quiet:
                listener = (rank - 1) % self._world_size
                if listener == self._rank:
                    heard_s = self._pulse.next_silent_s
                else:
                    heard_s = beats[listener].silence_of_next_s if listener in beats else 0.0
                if heard_s >= self._limit_s / 2.0 or listener in silent_s:
                    silent_s[rank] = heard_s
        return silent_s

    def _end(self, verdict: HangVerdict) -> None:
        """When all that can have reported, end the named rank first, then this process."""
        write_error_file(self._error_file, verdict.reason)
        self._wait_for_others(self._world_size - verdict.num_silent)
        if verdict.rank != self._rank:
            if verdict.num_silent:
                write_beside(self._error_file, own_rank=self._rank, rank=verdict.rank, line=verdict.reason)
                kill_if_stopped(verdict.rank)
            time.sleep(_AFTERWARDS_S)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._leave(1)

    def _wait_for_others(self, num_ranks: int) -> None:
        """Wait until that number of ranks has reported: torchrun ends the others at the first exit code."""
        until = time.monotonic() + _GRACE_S
        num_reported = self._store.add(_REPORTED, 1)
        while num_reported < num_ranks and time.monotonic() < until:
            time.sleep(0.1)
            num_reported = self._store.add(_REPORTED, 0)

    def _follow(self, failure: RankFailure) -> None:
        """End this rank after a failure of another one, of which its main thread has noticed nothing."""
        _log.error("rank %d stops: %s", self._rank, failure.line)
        if failure.host != this_process().host:
            write_error_file(self._error_file, failure.line)
        sys.stdout.flush()
        self._leave(1)

    def _leave_without_store(self) -> None:
        reason = (
            f"the job's store has not answered rank {self._rank} for {self._pulse.unanswered_s:.1f} s: the machine or process "
            "that hosts it (torchrun on MASTER_ADDR, or rank 0) is stopped or gone"
        )
        _log.error("stuck: %s", reason)
        write_error_file(self._error_file, reason)
        sys.stdout.flush()
        self._leave(1)
