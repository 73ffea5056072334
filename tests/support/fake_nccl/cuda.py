"""`torch.cuda` for ranks that are threads: streams, events and asynchronous copies of the device of whoever calls.

It stands for the few names that the runtime uses on CUDA: a copy is work on the current stream, memory can be pinned, and tensors
"on CUDA" are on the CPU. As by torch's host allocator, pinned memory is not reused before the copies from and to it are over. The
current device belongs to a thread: one that has not called `set_device` would open a context on GPU 0, and is an error. All else
of `torch.cuda` is in `tests.support.fake_cuda`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.support.fake_nccl import device as devices
from tests.support.fake_nccl.device import Device
from tests.support.fake_nccl.engine import here

_NUMBERS = itertools.count(1)


def set_device(device: Any) -> None:
    """As `torch.cuda.set_device`, for the thread that calls."""
    here().state["has set its device"] = True


def _current() -> Device:
    """The device of a call of this thread."""
    thread = here()
    if not thread.state.get("has set its device"):
        error = AssertionError(f"{thread.name} calls CUDA before set_device: it would use GPU 0")
        thread.engine.fail(error, thread.name)  # whoever catches it
        raise error
    return Device.current()


class Event(devices.Event):
    """As `torch.cuda.Event`; it passes when somebody first sees that it has."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__()
        self._passed_s = 0.0

    def record(self, stream: Any = None) -> None:
        _current()
        super().record(stream)
        self._passed_s = time.perf_counter()

    def query(self) -> bool:
        _current()
        return super().query()

    def synchronize(self) -> None:
        _current()
        super().synchronize()

    def elapsed_time(self, end: Event) -> float:
        """As in torch, of the host's clock."""
        assert self.query()
        assert end.query(), "as in torch, both events must have passed"
        return (end._passed_s - self._passed_s) * 1000.0


class OnDevice(TorchFunctionMode):
    """Copies on the current stream, pinned memory, and the CPU in place of CUDA devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            _current().current_stream().copy(*args)
            return args[0]
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = torch.device("cpu")
        is_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if is_pinned:
            _current().memory.pin(result)
        return result


@contextmanager
def cuda_of_ranks() -> Iterator[None]:
    """A context in which `torch.cuda` is that of the rank whose thread calls."""
    with mock.patch.multiple(
        torch.cuda,
        Stream=lambda *_: devices.Stream(_current(), f"side stream {next(_NUMBERS)}"),
        Event=Event,
        current_stream=lambda *_: _current().current_stream(),
        stream=lambda stream: _current().stream(stream),
        synchronize=lambda *_: _current().synchronize(),
        current_device=lambda: 0,
        set_device=set_device,
        memory_allocated=lambda *_: _current().arena.allocated,
        max_memory_allocated=lambda *_: _current().arena.most_allocated,
        reset_peak_memory_stats=lambda *_: _current().arena.reset_peak(),
    ):
        yield
