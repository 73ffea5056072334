"""The order of work on the streams and host threads of a fake CUDA machine, by vector clocks, and work that ends later.

Every stream and every host thread is a *timeline* with a clock: for each timeline, the number of its last step that is known to
come before. Queueing work on a stream makes a step there, after all that the queueing thread knows. An event carries the clock of
its record; who waits for it takes that clock over. So "A comes before B" is one comparison: B's clock at A's timeline is at least
A's step. torch's own sanitizer (`torch.cuda._sanitizer`) keeps such clocks for streams, but knows one host thread only: after
one thread synchronizes, work of all other threads counts as ordered, which hides the faults of threads that we look for.

Three simple rules stand for the device's own progress:

1. Computation runs on the host at the moment it is queued, so it has ended when the call returns.
2. `Pending` is work that another module runs on a thread of its own, such as a transfer. It is queued on a stream now and ends
   later. Everything behind it on that stream, and behind an event recorded there, is unfinished until then.
3. Computation queued on a stream that has unfinished work before it blocks the host until that work has ended. `wait_event`
   and `record` never block.

What this cannot show: a host that runs ahead of the device (rule 3 blocks it, as a transfer on the CPU would), kernels that run
at once and compete, streams that share a hardware queue, and order between host threads that hand work over by Python's queues
and locks without an event: such a handover is to be declared by `handed_over` and `take_over`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.support.fake_cuda.streams import Stream

__all__ = ["Clock", "FakeCudaError", "HostThread", "Machine", "Pending", "Stamp", "machine"]

Clock = dict[int, int]
"""Timeline -> number of its last step that comes before."""


class FakeCudaError(AssertionError):
    """Something that CUDA would punish, by an error, a wait or a wrong result. Not a subclass of what product code catches."""


class Stamp(NamedTuple):
    """One step of a timeline."""

    timeline: int
    step: int

    def is_before(self, clock: Clock) -> bool:
        """Whether this step comes before everything that has `clock`."""
        return clock.get(self.timeline, 0) >= self.step


def join(clock: Clock, other: Clock) -> None:
    """Take over what `other` knows."""
    for timeline, step in other.items():
        if clock.get(timeline, 0) < step:
            clock[timeline] = step


class Pending:
    """Work on a stream that ends when `finish` is called. Made by `Stream.enqueue`.

    Args:
        name: of the work, for errors.
        stamp: its step.
        clock: everything that comes before its end, itself included.
        behind: unfinished work that it must wait for.
        timeout_s: how long anybody waits for it.
    """

    def __init__(self, name: str, stamp: Stamp, clock: Clock, behind: tuple[Pending, ...], timeout_s: float) -> None:
        self.name, self.stamp, self.clock, self.behind = name, stamp, clock, behind
        self.ended_s: float | None = None
        self._timeout_s = timeout_s
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._is_over.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        """End it, on any thread. `error` is raised by everybody who waits for it on the host."""
        self._error, self.ended_s, self.behind = error, time.perf_counter(), ()
        self._is_over.set()

    def wait_turn(self) -> None:
        """Block until everything before it on its stream has ended. For the thread that runs it."""
        for earlier in self.behind:
            earlier.wait()

    def wait(self) -> None:
        """Block until it has ended."""
        if not self._is_over.wait(self._timeout_s):
            raise FakeCudaError(f"{self.name} has not ended in {self._timeout_s:g} s, and the host waits for it")
        if self._error is not None:
            raise self._error


@dataclass
class HostThread:
    """What CUDA keeps per host thread.

    Attributes:
        name: of the thread.
        timeline: number of its timeline.
        clock: what it knows to have ended.
        device: index of the current device; None until `torch.cuda.set_device`.
        streams: current stream per device.
    """

    name: str
    timeline: int
    clock: Clock
    device: int | None
    streams: dict[int, Stream]


class Machine:
    """The devices, streams and threads of one process. `machine()` is the one whose `torch.cuda` is installed.

    Args:
        num_devices: number of devices.
        timeout_s: how long the host waits for unfinished work before it is an error.
    """

    def __init__(self, *, num_devices: int = 1, timeout_s: float = 60.0) -> None:
        self.num_devices, self.timeout_s = num_devices, timeout_s
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.defaults: dict[int, Stream] = {}
        self.host_syncs: list[Callable[[str], None]] = []
        """Called with the name of the call whenever the host waits for the device."""
        self.errors: list[str] = []
        """Calls from threads without a device: what such a call raises may end its thread unseen."""
        self._timelines = itertools.count(1)
        self._local = threading.local()

    # -- threads ------------------------------------------------------------------------------------------------------

    def thread(self) -> HostThread:
        """What is kept for the calling thread, with or without a device."""
        if not hasattr(self._local, "thread"):
            number = self.new_timeline()
            self._local.thread = HostThread(threading.current_thread().name, number, {number: 1}, None, {})
        found: HostThread = self._local.thread
        return found

    def called(self, name: str) -> HostThread:
        """What is kept for the calling thread, at the start of a call that needs a device.

        Raises:
            FakeCudaError: the thread has not called `torch.cuda.set_device`. CUDA would take device 0, and make a context of
                hundreds of MiB there, for every rank.
        """
        thread = self.thread()
        if thread.device is None:
            self.errors.append(f"thread {thread.name!r} calls {name} and has not called torch.cuda.set_device")
            raise FakeCudaError(self.errors[-1])
        return thread

    def handed_over(self) -> Clock:
        """What the calling thread knows, to be given to `take_over` on the thread that gets its work."""
        with self.lock:
            return dict(self.thread().clock)

    def take_over(self, clock: Clock) -> None:
        """Order all that the calling thread does from now on after `clock`."""
        with self.lock:
            join(self.thread().clock, clock)

    # -- order --------------------------------------------------------------------------------------------------------

    def new_timeline(self) -> int:
        """The number of a new timeline."""
        return next(self._timelines)

    def step(self, stream: Stream) -> Stamp:
        """Make a step of a stream, after what the calling thread knows. Never blocks."""
        with self.lock:
            thread = self.thread()
            thread.clock[thread.timeline] += 1
            join(stream.clock, thread.clock)
            stream.clock[stream.timeline] = stream.clock.get(stream.timeline, 0) + 1
            return Stamp(stream.timeline, stream.clock[stream.timeline])

    def launch(self, stream: Stream) -> Stamp:
        """Make a step of a stream for computation that the host runs now: blocks while the stream has unfinished work."""
        for pending in stream.unfinished():
            pending.wait()
        return self.step(stream)

    # -- synchronization ----------------------------------------------------------------------------------------------

    def host_waits(self, name: str, clocks: Iterable[Clock], unfinished: Iterable[Pending]) -> None:
        """The calling thread waits for work that has these clocks.

        Args:
            name: of the call.
            clocks: what is over afterwards.
            unfinished: what to wait for.
        """
        for listener in self.host_syncs:
            listener(name)
        for pending in unfinished:
            pending.wait()
        self.host_knows(clocks)

    def host_knows(self, clocks: Iterable[Clock]) -> None:
        """The calling thread has learned that work with these clocks is over."""
        with self.lock:
            thread = self.thread()
            for clock in clocks:
                join(thread.clock, clock)

    def synchronize(self, device: int, name: str = "torch.cuda.synchronize") -> None:
        """The calling thread waits for all streams of a device, transfers included."""
        streams = [stream for stream in self.streams if stream.device.index == device]
        with self.lock:
            clocks = [dict(stream.clock) for stream in streams]
        self.host_waits(name, clocks, [pending for stream in streams for pending in stream.unfinished()])


class _Installed:
    """Holds the machine whose `torch.cuda` is installed: one per process, as CUDA itself is."""

    machine: Machine | None = None


def machine() -> Machine:
    """The installed machine."""
    if _Installed.machine is None:
        raise FakeCudaError("no fake of torch.cuda is installed in this process")
    return _Installed.machine


def install(new: Machine | None) -> Machine | None:
    """Replace the installed machine. Returns the one before."""
    before, _Installed.machine = _Installed.machine, new
    return before
