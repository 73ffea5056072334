"""Calls a test after every op of a rank's schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.runtime.recording import Recorder, fan_out

__all__ = ["after_each_op"]


def after_each_op(schedule: PipelineSchedule, show: Callable[[Any, Any], None]) -> None:
    """Call `show` with the `ChunkWork` in progress and the op, after each op of all iterations from here on."""
    runner: Any = schedule._runner
    make = runner._executor

    def make_observed(program: Any, work: Any, recorder: Recorder | None, hooks: Any) -> Any:
        return make(program, work, fan_out([each for each in (_Observer(work, show), recorder) if each is not None]), hooks)

    runner._executor = make_observed


class _Observer(Recorder):
    def __init__(self, work: Any, show: Callable[[Any, Any], None]) -> None:
        self._work, self._show = work, show

    def end(self, op: Any) -> None:
        self._show(self._work, op)
