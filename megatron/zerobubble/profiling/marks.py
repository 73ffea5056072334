"""Timestamps on one device, taken without synchronizing it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Marks:
    """Takes timestamps ("marks"): clock readings in seconds on the CPU, events on the current stream on CUDA.

    An event costs the device next to nothing and is read later: call `synchronize` once before reading any number of marks.

    Args:
        device: the device on which time is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        """Whether marks are events."""

    def now(self) -> Any:
        """Mark this moment; on CUDA the moment at which the current stream reaches this point."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait until all marks can be read. Synchronizes a CUDA device."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to another. On CUDA both events must have completed (`synchronize`, or a read of the
        stream's results)."""
        return float(start.elapsed_time(end)) if self.on_cuda else (end - start) * 1000.0
