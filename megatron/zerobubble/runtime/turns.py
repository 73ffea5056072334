"""Two passes of one rank, on a thread each, of which one computes at a time: the other one communicates or waits.

    backward: combine | .......... | experts | dispatch | ....... | attention | combine of the layer before | ..
    forward:  ....... | attention, | ....... | dispatch | experts | combine   | ...........................| attention

Each pass gives up its turn where it communicates, and takes it back when the other one does, or has ended. So who computes next
follows from the passes alone, and not from how long anything takes: all replicas that run the same pair issue the same
collectives in the same order. Those of the two passes never overlap with each other: on one process group that would be
another order on another rank.

Where a collective blocks the host (gloo), it runs on the thread of its pass while the other pass computes (`leave`, `come_back`).
Where it is issued to a stream (CUDA), the turn changes after that (`switch`): the host issues from one thread at a time.
"""

from __future__ import annotations

import enum
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.runtime.threads import start_thread

__all__ = ["BACKWARD", "Pair", "Side", "Turns", "Worker"]

BACKWARD = "backward of a pair"
"""Name of the thread of backward passes. While the main thread waits for its turn, this one shows what the rank does."""

_F = TypeVar("_F")
_B = TypeVar("_B")


class Side(enum.Enum):
    """One of the two passes."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def other(self) -> Side:
        """The pass beside it."""
        return Side.BACKWARD if self is Side.FORWARD else Side.FORWARD


class Pair:
    """Two passes that run now: whose turn it is, and how many collectives have begun and are over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = {Side.FORWARD, Side.BACKWARD}
        self._turn = Side.BACKWARD
        self._begun = self._over = 0
        self._failure: BaseException | None = None
        self.communicating: set[Side] = set()
        """The passes whose threads a collective blocks."""

    def has_both(self) -> bool:
        """Whether neither pass has ended."""
        return len(self._running) == 2

    def leave(self, side: Side) -> None:
        """Give the turn away, and wait until the collectives of both passes so far are over."""
        with self._changed:
            number = self._begun
            self._begun += 1
            self._give(side.other)
            self._changed.wait_for(lambda: self._over == number or self._failure is not None)
            self._check()
            self.communicating.add(side)

    def come_back(self, side: Side) -> None:
        """A collective of this pass is over: wait for its turn."""
        with self._changed:
            self.communicating.discard(side)
            self._over += 1
            self._changed.notify_all()
        self.wait(side)

    def switch(self, side: Side) -> None:
        """Give the turn away, and wait for it."""
        with self._changed:
            self._give(side.other)
        self.wait(side)

    def wait(self, side: Side) -> None:
        """Wait for the turn. Raises the error of the other pass."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn is side or self._failure is not None)
            self._check()

    def end(self, side: Side, failure: BaseException | None) -> None:
        """A pass has ended: all other turns are the other one's."""
        with self._changed:
            self._failure = self._failure or failure
            self._running.discard(side)
            self._give(side.other)

    def _give(self, side: Side) -> None:
        self._turn = side
        self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class Turns:
    """Runs pairs of passes, one pair at a time. Outside of a pair a pass keeps its turn.

    Args:
        device: of the passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pair: Pair | None = None
        self._worker: Worker | None = None

    def run(self, forward: Callable[[], _F], backward: Callable[[], _B]) -> tuple[_F, _B]:
        """Run both passes; the backward pass begins, on a thread of its own.

        Raises:
            BaseException: that of the pass that failed first. The other one ends at its next collective. A backward pass in a
                collective that blocks is not waited for: that may never end.
        """
        if self._pair is not None:
            raise ExecutionError("a pair of passes begins while another one runs")
        pair = self._pair = Pair()
        worker = self._worker = self._worker or Worker(self._device, BACKWARD)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        done = worker.submit(partial(_run, pair, Side.BACKWARD, backward, stream))
        try:
            result = _run(pair, Side.FORWARD, forward, stream)
            return result, done.result()
        except BaseException:
            if Side.BACKWARD in pair.communicating:
                self._worker = None
            else:
                done.exception()
            raise
        finally:
            self._pair = None

    def leave(self, side: Side) -> Pair | None:
        """Call before a collective that blocks the host: the other pass computes until its next one.

        Returns:
            What to `come_back` to when the collective is over; None if there is no other pass.
        """
        pair = self._pair
        if pair is None or not pair.has_both():
            return None
        pair.leave(side)
        return pair

    def switch(self, side: Side) -> bool:
        """Call after a collective was issued to a stream, and before anything waits for it.

        Returns:
            Whether there is another pass, which has had its turn.
        """
        pair = self._pair
        if pair is None or not pair.has_both():
            return False
        pair.switch(side)
        return True


def _run(pair: Pair, side: Side, work: Callable[[], Any], stream: Any) -> Any:
    """Run one pass from its first turn on."""
    failure: BaseException | None = None
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        try:
            pair.wait(side)
            return work()
        except BaseException as error:
            failure = error
            raise
        finally:
            pair.end(side, failure)
            del failure


class Worker:
    """A thread that runs one function at a time, on the device and with the number of threads of the one that made it.

    It ends with this object, and does not keep the process alive.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        start_thread(partial(_serve, self._tasks, torch.get_num_threads()), name=name, device=device)
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        """Run `task` on this thread."""
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return future


_Tasks = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


def _serve(tasks: _Tasks, num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # how a sum is divided on the CPU, and so its bits
    while (given := tasks.get()) is not None:
        task, future = given
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        del given, task, future  # and what they hold
