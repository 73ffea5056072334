"""The record of host synchronizations: which call made the host wait for the device, where, and in which part of an iteration."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["PARTS", "HostSync", "SyncLog"]

_SKIPPED = ("support/fake_cuda/", "torch/_dynamo", "torch/_compile", "torch/utils/_python_dispatch")
_PACKAGE = str(Path(__file__).parents[3] / "megatron" / "zerobubble")

PARTS: Mapping[str, str] = {
    "_run_step": "passes",
    "_before_gradients": "validation",
    "run_passes": "around the passes",
    "iterate": "step",
    "_train": "between",
}
"""Function on the stack -> the part of an iteration; the innermost counts. What a recorded iteration waits for before its first
op is around the passes; a progress line is between two iterations."""


@dataclass(frozen=True, kw_only=True)
class HostSync:
    """One wait of the host for the device."""

    call: str
    """What waited, for example "Tensor.item"."""
    place: str
    """The innermost line of this package, with the file and function in which the call was made."""
    caller: str
    """The innermost line that is not of the fake: where megatron-core or torch made the call."""
    part: str
    """A value of `PARTS`, "start" outside of all of them, or the name of another thread in angle brackets."""
    iteration: int
    """Iterations begun before."""


class SyncLog:
    """Collects host synchronizations. A listener of `Machine.host_syncs`; `iteration` is counted up by who runs the loop."""

    def __init__(self) -> None:
        self.iteration = 0
        self.syncs: list[HostSync] = []

    def __call__(self, call: str) -> None:
        """Record one, made by the caller of the fake."""
        frames = list(_frames(sys._getframe(1)))
        here = next((frame for frame in frames if not any(skip in frame.f_code.co_filename for skip in _SKIPPED)), frames[0])
        ours = next((frame for frame in frames if frame.f_code.co_filename.startswith(_PACKAGE)), here)
        self.syncs.append(
            HostSync(call=call, place=_text(ours), caller=_text(here), part=_part(frames), iteration=self.iteration)
        )

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(sync) for sync in self.syncs]


def _frames(frame: FrameType | None) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _part(frames: list[FrameType]) -> str:
    if threading.current_thread() is not threading.main_thread():
        return f"<{threading.current_thread().name}>"
    names = (frame.f_code.co_name for frame in frames if frame.f_code.co_filename.startswith(_PACKAGE))
    return next((PARTS[name] for name in names if name in PARTS), "start")


def _text(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
