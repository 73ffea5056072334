"""`torch.cuda.Stream`, `torch.cuda.Event` and the current stream of each thread, on the clocks of `clocks`.

Another double, for example of NCCL, queues work that ends later on a stream of its own:

    stream = Stream(priority=-1)
    stream.wait_event(current_stream().record_event())     # the transfer begins after what was computed so far
    work = stream.enqueue("recv from rank 1")              # a `Pending`: on the stream now, unfinished
    done = stream.record_event()                           # unfinished with it
    ...                                                    # on a thread: work.wait_turn(); transfer; work.finish()
    current_stream().wait_event(done)                      # `Work.wait`: the next computation blocks until `finish`

`Event.query()` is False until `finish`, `synchronize()` blocks until then, and so does `torch.cuda.synchronize()`.

What these cannot show: torch hands out 32 streams per priority in turn, so that the 33rd is the first again; here each is new.
Priorities change nothing. Events of other processes and CUDA graphs are missing.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.support.fake_cuda.clocks import Clock, FakeCudaError, Machine, Pending, machine

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "device_index", "set_stream", "stream"]


def device_index(device: Any, current: int | None) -> int:
    """The index that a device, a string, a number or None (the current one) stands for."""
    if device is None:
        index = current
    elif isinstance(device, int):
        index = current if device < 0 else device
    else:
        chosen = torch.device(device)
        if chosen.type != "cuda":
            raise ValueError(f"expected a cuda device, but got {device}")
        index = current if chosen.index is None else chosen.index
    if index is None or index >= machine().num_devices:
        raise FakeCudaError(f"device {device} of a machine with {machine().num_devices} devices")
    return index


class Stream:
    """As `torch.cuda.Stream`. `clock` is what comes before the next work on it."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        if kwargs:
            raise FakeCudaError(f"the fake torch.cuda.Stream does not know {', '.join(kwargs)}")
        owner = machine()
        self._set_up(owner, device_index(device, owner.called("torch.cuda.Stream").device), priority, is_default=False)

    def _set_up(self, owner: Machine, index: int, priority: int, *, is_default: bool) -> None:
        self._owner = owner
        self._unfinished: list[Pending] = []
        self.timeline = owner.new_timeline()
        self.clock: Clock = {}
        self.device = torch.device("cuda", index)
        self.priority = priority
        self.stream_id = self.cuda_stream = 0 if is_default else self.timeline
        with owner.lock:
            owner.streams.append(self)

    @classmethod
    def _default(cls, owner: Machine, index: int) -> Stream:
        with owner.lock:
            if index not in owner.defaults:
                made = cls.__new__(cls)
                made._set_up(owner, index, 0, is_default=True)
                owner.defaults[index] = made
            return owner.defaults[index]

    def __repr__(self) -> str:
        return f"<fake torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    @property
    def device_index(self) -> int:
        """Index of its device."""
        return int(self.device.index)

    def unfinished(self) -> tuple[Pending, ...]:
        """Work that has not ended, on this stream or on another one whose event this stream waits for."""
        with self._owner.lock:
            self._unfinished = [pending for pending in self._unfinished if not pending.is_over]
            return tuple(self._unfinished)

    def enqueue(self, name: str) -> Pending:
        """Queue work that ends when `Pending.finish` is called. Never blocks, and may be called on a thread without a device."""
        with self._owner.lock:
            stamp = self._owner.step(self)
            pending = Pending(name, stamp, dict(self.clock), self.unfinished(), self._owner.timeout_s)
            self._unfinished.append(pending)
            return pending

    def wait_event(self, event: Event) -> None:
        """Order all later work on this stream after the event. Never blocks."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Order all later work on this stream after what is on `stream` now. Never blocks."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here, a new one if none is given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on it: never."""
        return False

    def query(self) -> bool:
        """Whether everything on it has ended."""
        self._owner.called("Stream.query")
        if self.unfinished():
            return False
        self._owner.host_knows([self.clock])
        return True

    def synchronize(self) -> None:
        """Block until everything on it has ended."""
        self._owner.called("Stream.synchronize")
        with self._owner.lock:
            clock = dict(self.clock)
        self._owner.host_waits("Stream.synchronize", [clock], self.unfinished())


class Event:
    """As `torch.cuda.Event`. `clock` is that of the last record, None before the first."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if interprocess or external:
            raise FakeCudaError("the fake torch.cuda.Event is of one process, and of no CUDA graph")
        self._owner = machine()
        self._times = enable_timing
        self._recorded_s = 0.0
        self._captured: tuple[Pending, ...] = ()
        self.clock: Clock | None = None
        self.device: torch.device | None = None

    def unfinished(self) -> tuple[Pending, ...]:
        """Work before the last record that has not ended."""
        return tuple(pending for pending in self._captured if not pending.is_over)

    def record(self, stream: Stream | None = None) -> None:
        """Mark this point of a stream, by default of the current one. Never blocks."""
        self._owner.called("Event.record")
        stream = current_stream() if stream is None else stream
        if self.device is not None and self.device != stream.device:
            raise RuntimeError(f"Event device {self.device} does not match recording stream's device {stream.device}")
        with self._owner.lock:
            self._owner.step(stream)
            self.clock, self.device, self._captured = dict(stream.clock), stream.device, stream.unfinished()
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Order all later work on a stream, by default the current one, after this event. Never blocks."""
        self._owner.called("Event.wait")
        stream = current_stream() if stream is None else stream
        if self.clock is None:  # as in CUDA: an event that was never recorded is over
            return
        with self._owner.lock:
            self._owner.step(stream)
            for timeline, step in self.clock.items():
                stream.clock[timeline] = max(stream.clock.get(timeline, 0), step)
            stream._unfinished.extend(self.unfinished())

    def query(self) -> bool:
        """Whether everything before the last record has ended."""
        self._owner.called("Event.query")
        if self.unfinished():
            return False
        self._owner.host_knows([] if self.clock is None else [self.clock])
        return True

    def synchronize(self) -> None:
        """Block until everything before the last record has ended."""
        self._owner.called("Event.synchronize")
        self._owner.host_waits("Event.synchronize", [] if self.clock is None else [self.clock], self.unfinished())

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to a later one, of the host's clock."""
        self._owner.called("Event.elapsed_time")
        if not (self._times and end_event._times):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.clock is None or end_event.clock is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.unfinished() or end_event.unfinished():
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end_event._passed_s() - self._passed_s()) * 1000.0

    def _passed_s(self) -> float:
        return max([self._recorded_s, *(pending.ended_s or 0.0 for pending in self._captured)])


# -- the current stream ---------------------------------------------------------------------------------------------------


def default_stream(device: Any = None) -> Stream:
    """As `torch.cuda.default_stream`."""
    owner = machine()
    return Stream._default(owner, device_index(device, owner.called("torch.cuda.default_stream").device))


def current_stream(device: Any = None) -> Stream:
    """As `torch.cuda.current_stream`: of this thread, the default stream until another one is set."""
    owner = machine()
    thread = owner.called("torch.cuda.current_stream")
    index = device_index(device, thread.device)
    return thread.streams.get(index) or Stream._default(owner, index)


def set_stream(stream: Stream | None) -> None:
    """As `torch.cuda.set_stream`: of this thread; its device becomes the current one."""
    if stream is None:
        return
    thread = machine().called("torch.cuda.set_stream")
    thread.device = stream.device_index
    thread.streams[stream.device_index] = stream


class StreamContext:
    """As `torch.cuda.StreamContext`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            here = current_stream()
            self._before = [here] if here.device == self.stream.device else [current_stream(self.stream.device), here]
            set_stream(self.stream)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        for before in self._before:
            set_stream(before)


def stream(stream: Stream | None) -> StreamContext:
    """As `torch.cuda.stream`."""
    return StreamContext(stream)
