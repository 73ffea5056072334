"""The thread that publishes a rank's beats, and listens for those of the next rank."""

from __future__ import annotations

import linecache
import logging
import os
import sys
import threading
import time
from types import FrameType

from megatron.zerobubble.job.failure import RankFailure, who_failed
from megatron.zerobubble.job.heartbeats import Beat, publish, published, this_process
from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.job.stragglers import Stragglers
from megatron.zerobubble.job.tcp_connections import Connections, own_connections
from megatron.zerobubble.runtime import turns
from megatron.zerobubble.runtime.watch import Doing, Watch

__all__ = ["Pulse", "Stillness"]

_log = logging.getLogger(__name__)

_LOOKS_AT_ALL = 10
"""Beats of rank 0 between two looks at the speed of all ranks."""
_TORCH = ("torch.distributed.distributed_c10d", "torch.distributed.rendezvous")
"""Modules of torch whose functions wait for other ranks: collectives, sends and receives, and the first rendezvous."""
_WAITS = ("threading", "concurrent.futures._base")
"""Modules whose functions wait for another thread."""


class Stillness:
    """For how long a rank's activity has not changed, not counting time in which its process was stopped.

    Both threads of a watchdog look, so that a beat says what the rank does now.

    Args:
        watch: where the activity is reported.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._looked = time.monotonic()
        self._seen: tuple[Doing | None, float] = (None, 0.0)
        self._lock = threading.Lock()

    def look(self, interval_s: float) -> tuple[Doing | None, float]:
        """The activity, and for how many seconds it has not changed.

        Args:
            interval_s: seconds between two calls, as intended. If more than twice as many have passed, the process was stopped.
        """
        with self._lock:
            before, still_s = self._seen
            doing, now = self._watch.current(), time.monotonic()
            passed_s = min(now - self._looked, 2.0 * interval_s)
            self._looked = now
            self._seen = doing, (still_s + passed_s if doing is before else 0.0)
            return self._seen


class Pulse:
    """One rank's beats, and what it hears of the next rank's. Its counters are read by the watchdog's other thread.

    Args:
        store: the job's store, over a connection that no other thread uses: a store that does not answer blocks this thread.
        rank: this rank.
        world_size: number of ranks.
        interval_s: seconds between two beats.
        watch: this rank's activity.
        stillness: for how long it has not changed.
        alarm_key: key that is in the store after an alarm.
        long_s: seconds after which a wait is so long that the rank looks at its connections.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        interval_s: float,
        watch: Watch,
        stillness: Stillness,
        alarm_key: str,
        long_s: float,
    ) -> None:
        self._store, self._rank, self._world_size, self.interval_s = store, rank, world_size, interval_s
        self._watch, self._stillness, self._alarm_key = watch, stillness, alarm_key
        self._long_s = long_s
        self._process = this_process()
        self._stragglers = Stragglers()
        self._count = 0
        self.next_rank = (rank + 1) % world_size
        self.next_is_known = world_size == 1
        """Whether the next rank has published a beat, and the last one says what it does."""
        self.next_silent_s = 0.0
        """Seconds since something new was heard of the next rank."""
        self.next_depends = False
        """Whether what the next rank does may last because of others."""
        self.unanswered_s = 0.0
        """Seconds that the store has not answered; the watchdog's other thread counts them."""
        self.is_alarm = False
        """Whether the alarm has been raised, by any rank."""
        self.soon = threading.Event()
        """Set to have the next beat at once."""
        self.failure: RankFailure | None = None
        """The first rank that has failed."""
        self.depends = False
        """Whether what this rank did at its last beat may last because of others."""
        self.place = ""
        """Where its main thread was at its last beat."""

    def run(self, over: threading.Event) -> None:
        """Beat until `over`, and once more."""
        try:
            before, looked = None, time.monotonic()
            while not over.is_set():
                self._publish(is_last=False)
                self.is_alarm = self._store.check([self._alarm_key])
                self.failure = who_failed(self._store)
                heard = published(self._store, [self.next_rank]).get(self.next_rank)
                now = time.monotonic()
                passed_s = min(now - looked, 2.0 * self.interval_s)
                looked = now
                is_news = heard is not None and (heard.is_last or before is None or heard.count != before.count)
                self.next_silent_s = 0.0 if is_news else self.next_silent_s + passed_s
                self.next_is_known = self._world_size == 1 or (heard is not None and heard.doing is not None)
                self.next_depends = heard is not None and heard.depends_on_others
                before = heard
                if self._rank == 0 and self._world_size > 1 and self._count % _LOOKS_AT_ALL == 0:
                    self._look_for_stragglers()
                self.unanswered_s = 0.0
                self.soon.wait(self.interval_s)
                self.soon.clear()
            self._publish(is_last=True)
        except RuntimeError:  # the store is gone, and so is the job: the rank or the launcher that ended it has reported why
            return

    def _look_for_stragglers(self) -> None:
        beats = published(self._store, range(self._world_size))
        if len(beats) == self._world_size:
            for line in self._stragglers.look(beats):
                _log.warning("%s", line)

    def _publish(self, *, is_last: bool) -> None:
        self._count += 1
        doing, still_s = self._stillness.look(self.interval_s)
        frame = _main_frame()
        self.place, is_waiting = _place(frame), _is_waiting(doing, frame)
        beat = Beat(
            count=self._count,
            process=self._process,
            doing=None if doing is None else doing.text,
            place=self.place,
            is_waiting=is_waiting,
            waits_for=None if doing is None else doing.waits_for,
            is_shared=doing is None or doing.is_shared,
            still_s=still_s,
            silence_of_next_s=self.next_silent_s,
            interval_s=self.interval_s,
            busy_s=self._watch.busy_s,
            num_iterations=self._watch.num_iterations,
            connections=own_connections() if is_waiting and still_s >= self._long_s else Connections(),
            is_last=is_last,
        )
        self.depends = beat.depends_on_others
        publish(self._store, self._rank, beat)


def _is_waiting(doing: Doing | None, frame: FrameType | None) -> bool:
    """Whether a rank waits for others: because it reports a wait, or because its main thread is in a collective of torch.

    Nobody reports the collectives inside of an op, a step or a phase. A synchronous one is a function of torch. Of an
    asynchronous one the thread is in `Work.wait`, which is compiled and has no frame: its caller's is the innermost one, in a
    line that has the call.

    Args:
        doing: what the rank reported last.
        frame: the innermost frame of its main thread.
    """
    if doing is not None and doing.is_waiting:
        return True
    return frame is not None and (frame.f_globals.get("__name__") in _TORCH or ".wait()" in _line(frame))


def _line(frame: FrameType) -> str:
    """The line of source that a frame is in; empty if there is none."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _place(frame: FrameType | None) -> str:
    """A function, its file and line, for the report; empty without a frame."""
    if frame is None:
        return ""
    return f" (in {frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _main_frame() -> FrameType | None:
    """The innermost frame of the main thread; while that waits for the other pass of a pair, of the thread that this runs on."""
    frames = sys._current_frames()
    innermost = outer = frames.get(threading.main_thread().ident or 0)
    while outer is not None and outer.f_globals.get("__name__") in _WAITS:
        outer = outer.f_back
    if outer is innermost or outer is None or outer.f_globals.get("__name__") != turns.__name__:
        return innermost
    others = [frames.get(each.ident or 0) for each in threading.enumerate() if each.name == turns.BACKWARD]
    return next((each for each in others if each is not None and each.f_globals.get("__name__") != turns.__name__), innermost)
