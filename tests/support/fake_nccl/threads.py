"""Threads, queues, locks and events for the threads of a rank, known to the scheduler: in place of those of `threading`.

What one thread hands to another is ordered after what it did before, on the clocks of the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from megatron.zerobubble.runtime import issuer, threads
from tests.support.fake_nccl.clocks import Clock
from tests.support.fake_nccl.device import Device
from tests.support.fake_nccl.engine import HostThread, here, is_here


class _Waitable:
    """Something that threads wait for."""

    def __init__(self) -> None:
        self._clock: Clock = {}

    def _hand_on(self) -> None:
        """What this thread has done comes before what those do that wait."""
        if not is_here():
            return
        for number, time in Device.current().host().clock.items():
            self._clock[number] = max(time, self._clock.get(number, 0))

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        Device.current().engine.block_until(ready, lambda: what)
        Device.current().host().join(self._clock)


class Lock(_Waitable):
    def __init__(self) -> None:
        super().__init__()
        self._is_held = False

    def acquire(self, blocking: bool = True) -> bool:
        if blocking or not self._is_held:
            Device.current().engine.pause()
        if self._is_held and not blocking:
            return False
        if self._is_held:
            self._wait(lambda: not self._is_held, "a lock")
        self._is_held = True
        Device.current().host().join(self._clock)
        return True

    def release(self) -> None:
        self._hand_on()
        self._is_held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event(_Waitable):
    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def set(self) -> None:
        self._hand_on()
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        """As in `threading`; never gives up."""
        self._wait(lambda: self._is_set, "an event of another thread")
        return True


class SimpleQueue(_Waitable):
    def __init__(self) -> None:
        super().__init__()
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._hand_on()
        self._items.append(item)

    def get(self) -> Any:
        self._wait(lambda: bool(self._items), "something in a queue")
        return self._items.popleft()


class Thread:
    """As `threading.Thread`: it runs when the scheduler lets it. CUDA's current device is not handed on to it."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        assert daemon, "a thread of a rank must not outlive it"
        self._target, self._name = target, name
        self._thread: HostThread | None = None

    def start(self) -> None:
        parent = here()
        state = {key: value for key, value in parent.state.items() if key in ("device", "fabric", "enter")}
        world = ThreadLocalWorld._world.world

        def run() -> None:
            here().state.update(state)
            ThreadLocalWorld._world.world = world
            with state["enter"]():
                self._target()

        self._thread = parent.engine.spawn(f"thread {self._name}", parent.rank, run, serves=True)

    def join(self) -> None:
        thread = self._thread
        assert thread is not None
        here().engine.block_until(lambda: thread.is_over, lambda: f"the end of {thread.name}")


class _Threading:
    """The names of `threading` that the runtime uses."""

    Lock, Event, Thread = Lock, Event, Thread


@contextmanager
def scheduled_threads() -> Iterator[None]:
    """A context in which the threads of links are the scheduler's."""
    with (
        mock.patch.multiple(issuer, threading=_Threading, SimpleQueue=SimpleQueue),
        mock.patch.object(threads, "threading", _Threading),
    ):
        yield
