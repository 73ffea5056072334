"""Moments on one device, taken without stopping it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Marks:
    """A mark is a clock reading on the CPU, in seconds, and an event on the current stream on CUDA.

    An event costs the device nothing and is read when it is over: call `settle` once before reading any number of marks.

    Args:
        device: whose time is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        """Whether marks are events."""

    def now(self) -> Any:
        """Mark this moment; on CUDA the one at which the current stream comes here."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all marks can be read."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """From one mark to another, in milliseconds. On CUDA both must be over."""
        return float(start.elapsed_time(end)) if self.on_cuda else (end - start) * 1000.0
