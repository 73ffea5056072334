"""`torch.cuda.Stream`, `torch.cuda.Event` and the current stream of each thread. All work has ended when it is queued.

What these cannot show: order between streams, and work that ends later (for transfers `tests.support.fake_nccl` has both); torch
hands out 32 streams per priority in turn, so that the 33rd is the first again, here each is new. Priorities change nothing.
Events of other processes and CUDA graphs are missing.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.support.fake_cuda.machine import FakeCudaError, Machine, machine

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
    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        if kwargs:
            raise FakeCudaError(f"the fake torch.cuda.Stream does not know {', '.join(kwargs)}")
        owner = machine()
        self._set_up(owner, device_index(device, owner.called("torch.cuda.Stream").device), priority, is_default=False)

    def _set_up(self, owner: Machine, index: int, priority: int, *, is_default: bool) -> None:
        self._owner = owner
        self.device = torch.device("cuda", index)
        self.priority = priority
        self.stream_id = self.cuda_stream = 0 if is_default else next(owner.stream_ids)

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
        return int(self.device.index)

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


class Event:
    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if interprocess or external:
            raise FakeCudaError("the fake torch.cuda.Event is of one process, and of no CUDA graph")
        self._owner = machine()
        self._times = enable_timing
        self._recorded_s: float | None = None
        self.device: torch.device | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark this point of a stream, by default of the current one. Never blocks."""
        self._owner.called("Event.record")
        stream = current_stream() if stream is None else stream
        if self.device is not None and self.device != stream.device:
            raise RuntimeError(f"Event device {self.device} does not match recording stream's device {stream.device}")
        self.device, self._recorded_s = stream.device, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Order all later work on a stream, by default the current one, after this event. Never blocks."""
        self._owner.called("Event.wait")

    def query(self) -> bool:
        """Whether everything before the last record has ended."""
        self._owner.called("Event.query")
        return True

    def synchronize(self) -> None:
        """Block until everything before the last record has ended."""
        self._owner.called("Event.synchronize")
        self._owner.host_waits("Event.synchronize")

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to a later one, of the host's clock."""
        self._owner.called("Event.elapsed_time")
        if not (self._times and end_event._times):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_s is None or end_event._recorded_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_s - self._recorded_s) * 1000.0


# -- the current stream ---------------------------------------------------------------------------------------------------


def default_stream(device: Any = None) -> Stream:
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
    return StreamContext(stream)
