"""Issue transfers from a thread of their own.

On the CPU `isend` and `irecv` do work on the calling thread: gloo takes 0.1 to 0.4 ms per call with cold caches, between two ops,
where it delays all ranks that depend on this one. A second thread does that work while the next op runs, in the order of the
calls. On CUDA a call only launches on the calling thread's current stream, and needs no such thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

from megatron.zerobubble.runtime.threads import start_thread


class Begun(Protocol):
    """What a call has started: a `dist.Work`, or several."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Return when it is done."""


class Issued:
    """A call queued for the issuing thread, and the transfer that it starts."""

    __slots__ = ("_begin", "_error", "_is_made", "_work")

    def __init__(self, begin: Callable[[], Begun]) -> None:
        self._begin: Callable[[], Begun] | None = begin
        self._work: Begun | None = None
        self._error: Exception | None = None
        self._is_made = threading.Lock()  # held until the call is made: the cheapest thing a thread can wait for
        self._is_made.acquire()

    def make(self) -> None:
        """Make the call, on the issuing thread."""
        assert self._begin is not None
        try:
            self._work = self._begin()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        self._begin = None
        self._is_made.release()

    def wait(self) -> None:
        """Return when the transfer is done. Raises the error of the call, or of the transfer."""
        with self._is_made:
            error, work = self._error, self._work
        if error is not None:
            raise error
        assert work is not None
        work.wait()

    def wait_at_most(self, limit: timedelta) -> None:
        """`wait` for this long, or twice: for the call, and for the transfer. Raises RuntimeError after that."""
        if self._is_made.acquire(timeout=limit.total_seconds()):
            self._is_made.release()
            if self._work is not None:
                self._work.wait(limit)


class Issuer:
    """A thread that makes calls one after another. It ends with `close`, or when the issuer is garbage-collected.

    Args:
        device: device of the rank's tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._queue: SimpleQueue[Issued | None] = SimpleQueue()
        self._thread = start_thread(partial(_serve, self._queue), name="transfers", device=device)
        self._end = weakref.finalize(self, self._queue.put, None)

    def __call__(self, begin: Callable[[], Begun]) -> Issued:
        """Queue `begin` behind all earlier calls; returns at once."""
        issued = Issued(begin)
        self._queue.put(issued)
        return issued

    def close(self) -> None:
        """Return when every queued call has been made. To be called once."""
        self._end()
        self._thread.join()


def _serve(queue: SimpleQueue[Issued | None]) -> None:
    while (issued := queue.get()) is not None:
        issued.make()
        del issued  # it must not keep a tensor alive while the thread waits for the next call
