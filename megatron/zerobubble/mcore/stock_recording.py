"""Records the passes of megatron-core's own schedules, so that the baseline can be traced and drawn like the others.

Its functions start and stop the timers ``forward-compute`` and ``backward-compute`` of ``config.timers`` around every pass. In an
iteration that is recorded, timers stand there that report to the recorder, and pass on to the ones before. The n-th forward and
the n-th backward of a rank are the n-th of the plan of 1F1B or interleaved 1F1B. Transfers are not recorded: their time is idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.recording import Recorder

__all__ = ["PipelineGroupLinks", "recorded_passes"]

_FORWARD, _BACKWARD = "forward-compute", "backward-compute"


@contextmanager
def recorded_passes(config: Any, recorder: Recorder, ops: Sequence[Op]) -> Iterator[None]:
    """Inside, passes of megatron-core's schedules are recorded.

    Args:
        config: the chunks' TransformerConfig, whose timers are replaced.
        recorder: receives the start and end of every op.
        ops: this rank's ops in the plan.
    """
    before = config.timers
    config.timers = _PassTimers(before, recorder, ops)
    try:
        yield
    finally:
        config.timers = before


class _PassTimers:
    """Stands in for megatron-core's Timers."""

    def __init__(self, inner: Any | None, recorder: Recorder, ops: Sequence[Op]) -> None:
        self._inner = inner
        self._passes = {
            _FORWARD: _PassTimer(recorder, [op for op in ops if op.kind is OpKind.F]),
            _BACKWARD: _PassTimer(recorder, [op for op in ops if op.kind is OpKind.BW]),
        }

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        inner = _NoTimer() if self._inner is None else self._inner(name, log_level=log_level)
        timer = self._passes.get(name)
        if timer is None:
            return inner
        timer.inner = inner
        return timer


class _PassTimer:
    """Reports passes of one direction, in the order of the plan."""

    def __init__(self, recorder: Recorder, ops: Sequence[Op]) -> None:
        self.inner: Any = _NoTimer()
        self._recorder = recorder
        self._ops = iter(ops)
        self._op: Op | None = None

    def start(self, barrier: bool = False) -> None:
        self.inner.start(barrier=barrier)
        self._op = next(self._ops, None)
        if self._op is not None:
            self._recorder.start(self._op)

    def stop(self, barrier: bool = False) -> None:
        if self._op is not None:
            self._recorder.end(self._op)
        self.inner.stop(barrier=barrier)


class _NoTimer:
    """A timer that does nothing."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


class PipelineGroupLinks:
    """Links over megatron-core's own pipeline group, to compare clocks between iterations. Implements `runtime.p2p.P2PLinks`.

    Args:
        group: the pipeline's process group; sources and targets of messages are ranks in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, message: Message, tensor: Tensor) -> Any:
        """Send to the target of `message`."""
        return dist.isend(tensor, group=self._group, group_dst=message.target)

    def receive(self, message: Message, buffer: Tensor) -> Any:
        """Receive from the source of `message`."""
        return dist.irecv(buffer, group=self._group, group_src=message.source)
