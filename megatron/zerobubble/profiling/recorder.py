"""When each op of one iteration really ran.

On the CPU an op runs on the calling thread, so two clock readings per op say everything. On CUDA an op is only issued by the
host: a pair of events per op is recorded on the current stream and read after the iteration, which does not stall the device.
Times are milliseconds on the host's monotonic clock, which the ranks of one host share; on CUDA the device's times are placed on
it by the moment of `clear`, which must therefore come first.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.simulate import TimedOp


class OpRecorder:
    """Records the ops of one rank while switched on.

    Args:
        device: decides how time is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[Op, Any, Any]] = []
        self._started: Any = None
        self.origin_ms = 0.0
        """Host monotonic clock at `clear`, in milliseconds: places ranks of one host on a common axis."""
        self._origin_event: Any = None

    def clear(self) -> None:
        """Forget what was recorded; the next op begins a new iteration."""
        self._marks.clear()
        if self._on_cuda:
            torch.cuda.synchronize()
            self._origin_event = self._now()
        self.origin_ms = time.perf_counter() * 1000.0

    def start(self, op: Op) -> None:
        """The op is about to run."""
        self._started = self._now()

    def end(self, op: Op) -> None:
        """The op's work has been issued (CUDA) or done (CPU)."""
        self._marks.append((op, self._started, self._now()))

    def timed_ops(self) -> list[TimedOp]:
        """What was recorded since `clear`, in the order it ran, on the host's monotonic clock. Synchronises a CUDA device."""
        if not self._on_cuda:
            return [TimedOp(op, start * 1000.0, end * 1000.0) for op, start, end in self._marks]
        torch.cuda.synchronize()
        zero = self._origin_event
        return [
            TimedOp(op, self.origin_ms + zero.elapsed_time(start), self.origin_ms + zero.elapsed_time(end))
            for op, start, end in self._marks
        ]

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
