"""Starting transfers from a thread of their own.

On the CPU `isend` and `irecv` are work of the calling thread: gloo takes 0.1 to 0.4 ms a call with cold caches, between two ops,
where every rank behind waits, too. A thread beside the rank's own does that work while the next op runs. Calls are made in the
order in which they were given. On CUDA a call only launches, on the calling thread's current stream, and is made where it stands.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch.distributed as dist


class Issued:
    """A call that has been handed over."""

    __slots__ = ("_begin", "_error", "_is_made", "_work")

    def __init__(self, begin: Callable[[], dist.Work]) -> None:
        self._begin: Callable[[], dist.Work] | None = begin
        self._work: dist.Work | None = None
        self._error: Exception | None = None
        self._is_made = threading.Lock()  # held until then: the cheapest thing a thread can wait for
        self._is_made.acquire()

    def make(self) -> None:
        """Make the call, on the issuing thread."""
        assert self._begin is not None
        try:
            self._work = self._begin()
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            self._error = error
        self._begin = None
        self._is_made.release()

    def wait(self) -> None:
        """Return when the transfer is done. Raises what the call raised, or what its work does."""
        with self._is_made:
            error, work = self._error, self._work
        if error is not None:
            raise error
        assert work is not None
        work.wait()


class Issuer:
    """A thread that makes calls one after another. It lives until `close`, or until nobody has the issuer any more."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Issued | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._given,), name="transfers", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._given.put, None)

    def __call__(self, begin: Callable[[], dist.Work]) -> Issued:
        """Have `begin` called after all that was given before; does not wait for it."""
        issued = Issued(begin)
        self._given.put(issued)
        return issued

    def close(self) -> None:
        """Return when everything given has been called. To be called once."""
        self._end()
        self._thread.join()


def _serve(given: SimpleQueue[Issued | None]) -> None:
    while (issued := given.get()) is not None:
        issued.make()
        del issued  # it must not keep a tensor alive while the thread waits for the next
