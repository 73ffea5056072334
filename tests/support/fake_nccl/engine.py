"""A scheduler that lets one thread at a time run, in an order that a seed picks, and knows when nobody can go on.

The host of each rank is a thread of one process; the kernels of their devices are movers, without a thread. A thread runs until
it calls `pause` or `block_until`; there the scheduler picks who is next among all threads that could go on and all movers that
could move. So a seed names one interleaving exactly. That nobody can go on is seen at once, and no time is waited for.

What is late in a run is decided by how the scheduler picks:

    lazy    transfers move only when no host can go on, one at a time: every transfer as late as it can be
    eager   transfers move before any host goes on: every transfer as early as it can be
    speeds  everybody has a speed out of four decades, drawn again now and then: a slow rank, a slow link, one late kernel
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

MAX_STEPS_WITHOUT_A_HOST = 1_000_000
"""Moves in a row after which a mover is broken: there are fewer kernels."""


class FakeNcclError(BaseException):
    """What goes wrong in a run. Not an Exception: no code that runs there may catch it, as some does to raise it later."""


class StuckError(FakeNcclError):
    """Nobody can go on: a deadlock. The message states what every rank waits for."""


class AbandonedError(FakeNcclError):
    """Raised in the threads of a run that has failed elsewhere, where they wait."""


class Mover(Protocol):
    """Something that happens on a device, in any order that its own `ready` allows."""

    def ready(self) -> bool:
        """Whether `move` can do something."""

    def move(self) -> None:
        """Do one thing."""

    def waiting(self) -> Sequence[str]:
        """What has been issued here and is not over, in words."""


class HostThread:
    """The thread of one rank.

    Args:
        engine: which lets it run.
        name: in messages.
        rank: whose thread it is.
        run: what it does.
    """

    def __init__(self, engine: Engine, name: str, rank: int, run: Callable[[], None]) -> None:
        self.engine, self.name, self.rank = engine, name, rank
        self.gate = threading.Lock()
        self.gate.acquire()
        self.ready: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.is_over = False
        self.state: dict[str, Any] = {}
        """What belongs to the thread: its device and its communicators."""
        self._run = run
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def _main(self) -> None:
        _HERE.thread = self
        self.gate.acquire()
        try:
            if self.engine.failure is None:
                self.engine.resumed(self)
                self._run()
        except AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the thread that called `Engine.run`
            self.engine.fail(error, f"{self.name} (rank {self.rank})")
        self.is_over = True
        self.engine.leave(self)


_HERE = threading.local()


def is_here() -> bool:
    """Whether the caller is a thread of a run, and not for example a finalizer after it."""
    return hasattr(_HERE, "thread")


def here() -> HostThread:
    return _HERE.thread  # type: ignore[no-any-return]


class Engine:
    """Threads and movers, one of which runs at a time.

    Args:
        seed: of the order.
        resumed: called with a thread before it goes on, for state of the process that each rank has its own of.
    """

    def __init__(self, seed: int, resumed: Callable[[HostThread], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.lateness = ("speeds", "lazy", "eager")[seed % 3]
        self.failure: BaseException | None = None
        self.failed_in = ""
        self.num_steps = 0
        self._resumed = resumed
        self._threads: list[HostThread] = []
        self._movers: list[Mover] = []
        self._speeds: dict[int, float] = {}
        self._done = threading.Lock()
        self._done.acquire()
        self._is_done = False
        self._running: HostThread | None = None

    def spawn(self, name: str, rank: int, run: Callable[[], None]) -> None:
        thread = HostThread(self, name, rank, run)
        self._threads.append(thread)
        thread.thread.start()

    def add(self, mover: Mover) -> None:
        self._movers.append(mover)

    def run(self) -> None:
        """Let everybody run until all threads are over. Raises the first error of any of them."""
        chosen = self._next()
        if chosen is not None:
            chosen.gate.release()
            self._done.acquire()
        first = self._running
        for thread in sorted(self._threads, key=lambda each: each is not first):  # one at a time, the failed one first
            self.failure = self.failure or AbandonedError()
            if not thread.is_over and thread is not first:
                thread.gate.release()
            thread.thread.join()
        if self.failure is not None and not isinstance(self.failure, AbandonedError):
            raise self.failure

    def pause(self) -> None:
        """Perhaps let others run first."""
        self._stop_if_failed()
        if self.random.random() < 0.5:
            self._switch(None, str)

    def block_until(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Let others run until `ready`.

        Args:
            ready: looked at whenever anything has happened; must not change anything.
            waits_for: what the thread waits for, in words, should it wait forever.
        """
        self._stop_if_failed()
        if not ready() or self.random.random() < 0.5:
            self._switch(ready, waits_for)

    def fail(self, error: BaseException, where: str) -> None:
        if self.failure is None:
            self.failure, self.failed_in = error, where
            self._running = getattr(_HERE, "thread", None)

    def resumed(self, thread: HostThread) -> None:
        """The thread goes on."""
        if self._resumed is not None:
            self._resumed(thread)

    def leave(self, thread: HostThread) -> None:
        """The thread is over: somebody else runs."""
        if self._is_done:
            return
        chosen = None
        if self.failure is None and not all(each.is_over for each in self._threads):
            chosen = self._next()
        if chosen is None:
            self._finish(thread)
        else:
            chosen.gate.release()

    def _finish(self, thread: HostThread | None) -> None:
        if not self._is_done:
            self._is_done, self._running = True, thread
            self._done.release()

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            self._finish(here())
            raise AbandonedError

    def _switch(self, ready: Callable[[], bool] | None, waits_for: Callable[[], str]) -> None:
        me = here()
        me.ready, me.waits_for = ready, waits_for
        chosen = self._next()
        if chosen is not me:
            if chosen is None:
                self._stop_if_failed()
            assert chosen is not None
            chosen.gate.release()
            me.gate.acquire()
            self._stop_if_failed()
            self.resumed(me)
        me.ready = None

    def _next(self) -> HostThread | None:
        """The thread that runs next, after the moves that come before; None if the run has failed."""
        for _ in range(MAX_STEPS_WITHOUT_A_HOST):
            self.num_steps += 1
            hosts = [each for each in self._threads if not each.is_over and (each.ready is None or each.ready())]
            movers = [] if hosts and self.lateness == "lazy" else [mover for mover in self._movers if mover.ready()]
            if not hosts and not movers:
                self.fail(StuckError(self._stuck()), "the scheduler")
                return None
            chosen = self._pick([*movers] if movers and self.lateness == "eager" else [*hosts, *movers])
            if isinstance(chosen, HostThread):
                return chosen
            try:
                with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # the modes are the host's
                    chosen.move()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that called `run`
                self.fail(error, "a kernel")
                return None
        raise AssertionError("a mover moves forever")

    def _pick(self, candidates: list[Any]) -> Any:
        if len(candidates) == 1:
            return candidates[0]
        if self.lateness != "speeds":
            return candidates[int(self.random.random() * len(candidates))]
        speeds = self._speeds
        if self.random.random() < 0.02:
            speeds.pop(id(self.random.choice(candidates)), None)
        total, sums = 0.0, []
        for each in candidates:
            key = id(each)
            if key not in speeds:
                speeds[key] = 10.0 ** (-4.0 * self.random.random())
            total += speeds[key]
            sums.append(total)
        drawn = self.random.random() * total
        return next(each for each, limit in zip(candidates, sums, strict=True) if drawn <= limit)

    def _stuck(self) -> str:
        lines = [
            f"rank {thread.rank}, {thread.name}: waits for {thread.waits_for()}" for thread in self._threads if not thread.is_over
        ]
        lines += [line for mover in self._movers for line in mover.waiting()]
        return "\n".join(["nobody can go on:", *lines])
