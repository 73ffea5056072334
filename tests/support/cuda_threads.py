"""A double of what CUDA keeps per thread: the current device, 0 in a new thread. It is not CUDA.

It stands for `torch.cuda.set_device`, `current_device` and events, as far as it matters which thread calls them, and notes
which GPU each call would have opened a context on. It has no streams, no time and no memory: a context's size cannot be seen.
"""

from __future__ import annotations

import threading

import pytest
import torch


class CudaOfThreads:
    """Notes the current device of each thread that calls CUDA."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.touched: dict[str, set[int]] = {}
        """Name of a thread -> the GPUs that were current when it called CUDA."""
        self.num_calls = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of `torch.cuda`'s functions."""
        double = self

        class Event:
            """A torch.cuda.Event that has completed."""

            def __init__(self, *, enable_timing: bool = False) -> None:
                self._has_time = enable_timing

            def elapsed_time(self, end: Event) -> float:
                assert self._has_time
                double.touch()
                return 1.0

            def record(self, stream: object = None) -> None:
                double.touch()

            def query(self) -> bool:
                double.touch()
                return True

            def synchronize(self) -> None:
                double.touch()

        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(self._current, "device", 0))
        monkeypatch.setattr(torch.cuda, "Event", Event)

    def set_device(self, device: int) -> None:
        """For the calling thread."""
        self._current.device = device

    def touch(self) -> None:
        """The calling thread calls CUDA."""
        self.touched.setdefault(threading.current_thread().name, set()).add(getattr(self._current, "device", 0))
        self.num_calls += 1
