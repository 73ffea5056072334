"""The devices, streams and host threads of a fake CUDA machine: which thread has chosen which device, and when the host waits.

All work runs on the host at the moment it is queued, so it has ended when the call returns: nothing is ever late. What must be
ordered after what is a question for `tests.support.fake_nccl`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.fake_cuda.streams import Stream

__all__ = ["FakeCudaError", "HostThread", "Machine", "machine"]


class FakeCudaError(AssertionError):
    """Something that CUDA would punish, by an error, a wait or a wrong result. Not a subclass of what product code catches."""


@dataclass
class HostThread:
    """What CUDA keeps per host thread.

    Attributes:
        name: of the thread.
        device: index of the current device; None until `torch.cuda.set_device`.
        streams: current stream per device.
    """

    name: str
    device: int | None = None
    streams: dict[int, Stream] = field(default_factory=dict)


class Machine:
    """The devices, streams and threads of one process. `machine()` is the one whose `torch.cuda` is installed.

    Args:
        num_devices: number of devices.
    """

    def __init__(self, *, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.lock = threading.RLock()
        self.defaults: dict[int, Stream] = {}
        self.stream_ids = itertools.count(1)
        self.host_syncs: list[Callable[[str], None]] = []
        """Called with the name of the call whenever the host waits for the device."""
        self.errors: list[str] = []
        """Calls from threads without a device: what such a call raises may end its thread unseen."""
        self._local = threading.local()

    def thread(self) -> HostThread:
        """What is kept for the calling thread, with or without a device."""
        if not hasattr(self._local, "thread"):
            self._local.thread = HostThread(threading.current_thread().name)
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

    def host_waits(self, name: str) -> None:
        """The calling thread waits for the device in a call of this name."""
        for listener in self.host_syncs:
            listener(name)


class _Installed:
    """Holds the machine whose `torch.cuda` is installed: one per process, as CUDA itself is."""

    machine: Machine | None = None


def machine() -> Machine:
    if _Installed.machine is None:
        raise FakeCudaError("no fake of torch.cuda is installed in this process")
    return _Installed.machine


def install(new: Machine | None) -> Machine | None:
    """Replace the installed machine. Returns the one before."""
    before, _Installed.machine = _Installed.machine, new
    return before
