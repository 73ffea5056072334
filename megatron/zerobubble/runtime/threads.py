"""Threads of this package: each begins by making its rank's GPU the current one.

CUDA's current device belongs to a thread, and is GPU 0 in a new one. A thread that only queries an event there makes CUDA open a
context on GPU 0, of about half a GiB, once per rank of the host. So every thread that may call CUDA is started here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["start_thread"]


def start_thread(function: Callable[[], object], *, name: str, device: torch.device) -> threading.Thread:
    """Start a daemon thread that runs `function`, on CUDA with `device` as its current device.

    Args:
        function: what it runs.
        name: its name, for tracebacks.
        device: device of this rank's tensors; a CUDA device without an index is the caller's current one.
    """
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index

    def run() -> None:
        if index is not None:
            torch.cuda.set_device(index)
        function()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
