"""One rank's device: its compute stream, memory, and synchronization with the host.

The compute stream runs at the host: what is computed there has been computed when the call returns, and where that stream waits
(`Work.wait`) the host waits with it. That takes nothing away from the order: clocks count a wait of the stream as one of that
stream only, and not of the host. Communicators have streams of their own, which run when the scheduler picks them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from tests.support.fake_nccl.clocks import Clock, Timeline
from tests.support.fake_nccl.engine import Engine, here
from tests.support.fake_nccl.memory import Arena, Memory


class Mark:
    """A point of a communicator's stream."""

    __slots__ = ("clock", "is_reached", "text")

    def __init__(self, clock: Clock, text: str) -> None:
        self.clock, self.text, self.is_reached = clock, text, False


class Startable(Protocol):
    """A kernel in the hardware queue."""

    text: str

    def try_to_start(self) -> bool:
        """Start, if its stream has come to it; whether it has started."""


class Device:
    """One rank's device.

    Args:
        engine: of the run.
        rank: in messages.
        single_queue: whether all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1): a kernel starts when all that
            were issued before it have.
    """

    def __init__(self, engine: Engine, rank: int, *, single_queue: bool = False) -> None:
        self.engine, self.rank, self._single_queue = engine, rank, single_queue
        self._in_queue: deque[Startable] = deque()
        self._num_timelines = 0
        self.ends: list[Callable[[], bool]] = []
        """Per communicator whether its stream here is idle."""
        self.stalls: list[str] = []
        """Sends that were waited for before they were over."""
        self.compute_stream = self.timeline("the compute stream")
        self.memory = Memory(rank, self.compute_stream, self.host)
        self.arena = Arena(self.memory)

    @staticmethod
    def current() -> Device:
        """The device of the thread that runs."""
        device = here().state["device"]
        assert isinstance(device, Device)
        return device

    def timeline(self, name: str) -> Timeline:
        self._num_timelines += 1
        return Timeline(self._num_timelines, name)

    def host(self) -> Timeline:
        """The timeline of the host's thread, which runs."""
        thread = here()
        if "timeline" not in thread.state:
            thread.state["timeline"] = self.timeline(thread.name)
        timeline = thread.state["timeline"]
        assert isinstance(timeline, Timeline)
        return timeline

    def wait(self, mark: Mark) -> None:
        """The compute stream waits, and what is computed from here on comes after the mark."""
        self.engine.block_until(lambda: mark.is_reached, lambda: mark.text)
        self.compute_stream.join(mark.clock)

    def compute(self, text: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """A kernel on the compute stream: check its accesses."""
        self._start_compute(text)
        self.compute_stream.join(self.host().clock)
        for tensor in reads:
            self.memory.read(tensor, self.compute_stream, text)
        for tensor in writes:
            self.memory.write(tensor, self.compute_stream, text)

    def issued(self, kernel: Startable) -> None:
        """A kernel is behind all others in the hardware queue."""
        if self._single_queue:
            self._in_queue.append(kernel)

    def may_start(self, kernel: Startable) -> bool:
        """Whether the hardware queue has come to a kernel."""
        return not self._single_queue or (self._has_started(len(self._in_queue)) or kernel not in self._in_queue)

    def _has_started(self, count: int) -> bool:
        """Start what can start; whether the first `count` kernels in the queue have."""
        before = len(self._in_queue)
        while self._in_queue and self._in_queue[0].try_to_start():
            self._in_queue.popleft()
        return before - len(self._in_queue) >= count

    def _start_compute(self, text: str) -> None:
        """A kernel of the compute stream starts: with one hardware queue when all before it have."""
        if self._single_queue:
            self.engine.block_until(
                lambda: self._has_started(len(self._in_queue)), lambda: f"{self._in_queue[0].text} to start, before {text}"
            )

    def synchronize(self, why: str = "a device-wide synchronization") -> None:
        """As `torch.cuda.synchronize`: wait for everything that has been issued on this device, running receives too."""
        self.engine.block_until(lambda: all(is_idle() for is_idle in self.ends), lambda: why)
        self.host().join(self.compute_stream.clock)
        if self.memory.late:
            raise self.memory.late[0]
