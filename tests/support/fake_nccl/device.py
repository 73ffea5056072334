"""One rank's device: streams, events, memory, and synchronization with the host.

The default stream runs at the host: what is computed there has been computed when the call returns, and where that stream waits
(`Work.wait`, `Stream.wait_event`) the host waits with it. That takes nothing away from the order: clocks count a wait of a stream
as one of that stream only, and not of the host or of other streams. Other streams run on their own, when the scheduler
picks them, and so do communicators.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from tests.support.fake_nccl.clocks import Clock, Timeline
from tests.support.fake_nccl.engine import Engine, HostThread, here
from tests.support.fake_nccl.memory import Arena, Memory, Reference


class Mark:
    """A point of a stream."""

    __slots__ = ("clock", "is_reached", "text")

    def __init__(self, clock: Clock, text: str, *, is_reached: bool = False) -> None:
        self.clock, self.text, self.is_reached = clock, text, is_reached


class Startable(Protocol):
    """A kernel in the hardware queue."""

    text: str

    def try_to_start(self) -> bool:
        """Start, if its stream has come to it; whether it has started."""


class Stream:
    """As `torch.cuda.Stream`.

    Args:
        device: whose.
        name: in messages.
        at_host: whether it is the default stream, whose work is done where it is issued.
    """

    def __init__(self, device: Device, name: str, *, at_host: bool = False) -> None:
        self.device, self.name, self.at_host = device, name, at_host
        self.timeline = device.timeline(name)
        self._queue: deque[tuple[Callable[[], bool] | None, Callable[[], None], str]] = deque()
        device.streams.append(self)
        device.engine.add(self)

    def mark(self) -> Mark:
        mark = Mark(dict(self.timeline.clock), f"work on {self.name}", is_reached=not self._queue)
        if self._queue:
            self._queue.append((None, lambda: setattr(mark, "is_reached", True), "an event"))
        return mark

    def wait(self, mark: Mark) -> None:
        """What is issued from here on comes after the mark."""
        if self.at_host:
            self.device.engine.block_until(lambda: mark.is_reached, lambda: mark.text)
        elif not mark.is_reached:
            self._queue.append((lambda: mark.is_reached, lambda: None, f"a wait for {mark.text}"))
        self.timeline.join(mark.clock)

    def wait_event(self, event: Event) -> None:
        """As in torch. An event that was never recorded is over."""
        if event.recorded is not None:
            self.wait(event.recorded)

    def wait_stream(self, stream: Stream) -> None:
        self.wait(stream.mark())

    def compute(self, text: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Check the accesses of work that the caller does now, or has queued."""
        if self.at_host:
            self.device.start_compute(text)
        self.timeline.join(self.device.host().clock)
        for tensor in reads:
            self.device.memory.read(tensor, self.timeline, text)
        for tensor in writes:
            self.device.memory.write(tensor, self.timeline, text)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """As `target.copy_(source, non_blocking=True)` with this stream current."""
        text = f"a copy on {self.name}"
        self.compute(text, reads=[source], writes=[target])
        if self.at_host:
            target.copy_(source)
            return
        arena = self.device.arena
        into, out_of = Reference(target, arena, text), Reference(source, arena, text)
        pinned = [tensor for tensor in (target, source) if self.device.memory.is_pinned(tensor)]

        def run(pinned: object = pinned) -> None:
            into.tensor().copy_(out_of.tensor())

        self._queue.append((None, run, text))

    def query(self) -> bool:
        return not self._queue

    def ready(self) -> bool:
        return bool(self._queue) and (self._queue[0][0] is None or self._queue[0][0]())

    def move(self) -> None:
        self._queue.popleft()[1]()

    def waiting(self) -> Sequence[str]:
        return [f"rank {self.device.rank}, {self.name}: {self._queue[0][2]} is next"] if self._queue else []


class Event:
    def __init__(self) -> None:
        self.recorded: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark this point of a stream, by default of the current one."""
        self.recorded = (stream or Device.current().current_stream()).mark()

    def query(self) -> bool:
        return self.recorded is None or self.recorded.is_reached

    def synchronize(self) -> None:
        mark = self.recorded
        if mark is not None:
            device = Device.current()
            device.engine.block_until(lambda: mark.is_reached, lambda: mark.text)
            device.host().join(mark.clock)


class Device:
    """One rank's device.

    Args:
        engine: of the run.
        rank: in messages.
        checks: whether accesses that nothing orders are errors.
        single_queue: whether all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1): a kernel starts when all that
            were issued before it have.
    """

    def __init__(self, engine: Engine, rank: int, *, checks: bool = True, single_queue: bool = False) -> None:
        self.engine, self.rank, self._single_queue = engine, rank, single_queue
        self._in_queue: deque[Startable] = deque()
        self._num_timelines = 0
        self.streams: list[Stream] = []
        self.ends: list[Callable[[], bool]] = []
        """Per communicator whether its stream here is idle."""
        self.num_syncs = 0
        """Times that the host has waited for the whole device."""
        self.stalls: list[str] = []
        """Sends that were waited for before they were over."""
        self.default = Stream(self, "the compute stream", at_host=True)
        self.memory = Memory(rank, self.default.timeline, self.host, checks=checks)
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

    def host(self, thread: HostThread | None = None) -> Timeline:
        """The timeline of a thread of the host, by default of the one that runs."""
        thread = thread or here()
        if "timeline" not in thread.state:
            thread.state["timeline"] = self.timeline(thread.name)
        timeline = thread.state["timeline"]
        assert isinstance(timeline, Timeline)
        return timeline

    def current_stream(self) -> Stream:
        """Of this thread."""
        stream = here().state.get("stream", self.default)
        assert isinstance(stream, Stream)
        return stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        here().state["stream"] = stream
        try:
            yield
        finally:
            here().state["stream"] = before

    def compute(self, text: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """A kernel on the current stream."""
        self.current_stream().compute(text, reads=reads, writes=writes)

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

    def start_compute(self, text: str) -> None:
        """A kernel of the default stream starts: with one hardware queue when all before it have."""
        if self._single_queue:
            self.engine.block_until(
                lambda: self._has_started(len(self._in_queue)), lambda: f"{self._in_queue[0].text} to start, before {text}"
            )

    def synchronize(self, why: str = "a device-wide synchronization") -> None:
        """As `torch.cuda.synchronize`: wait for everything that has been issued on this device, running receives too."""
        self.num_syncs += 1
        self.engine.block_until(self._is_idle, lambda: why)
        for stream in self.streams:
            self.host().join(stream.timeline.clock)
        if self.memory.late:
            raise self.memory.late[0]

    def _is_idle(self) -> bool:
        return all(stream.query() for stream in self.streams) and all(is_idle() for is_idle in self.ends)
