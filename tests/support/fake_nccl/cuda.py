"""`torch.cuda` for ranks that are threads: streams, events and asynchronous copies of the device of whoever calls.

It stands for the few names that the runtime uses on CUDA: a copy is work on the current stream, memory can be pinned, and tensors
"on CUDA" are on the CPU. As by torch's host allocator, pinned memory is not reused before the copies from and to it are over. All
else of `torch.cuda` is in `tests.support.fake_cuda`.
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

_NUMBERS = itertools.count(1)


class Event(devices.Event):
    """As `torch.cuda.Event`; it passes when somebody first sees that it has."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__()
        self._passed_s = 0.0

    def record(self, stream: Any = None) -> None:
        """As in torch."""
        super().record(stream)
        self._passed_s = time.perf_counter()

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
            Device.current().current_stream().copy(*args)
            return args[0]
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = torch.device("cpu")
        is_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if is_pinned:
            Device.current().memory.pin(result)
        return result


@contextmanager
def cuda_of_ranks() -> Iterator[None]:
    """A context in which `torch.cuda` is that of the rank whose thread calls."""
    with mock.patch.multiple(
        torch.cuda,
        Stream=lambda *_: devices.Stream(Device.current(), f"side stream {next(_NUMBERS)}"),
        Event=Event,
        current_stream=lambda *_: Device.current().current_stream(),
        stream=lambda stream: Device.current().stream(stream),
        synchronize=lambda *_: Device.current().synchronize(),
        current_device=lambda: 0,
        set_device=lambda *_: None,
        memory_allocated=lambda *_: Device.current().arena.allocated,
        max_memory_allocated=lambda *_: Device.current().arena.most_allocated,
        reset_peak_memory_stats=lambda *_: Device.current().arena.reset_peak(),
    ):
        yield
