"""Choose which iterations of a run are recorded, and keep the recordings.

By default a few early training iterations and then every `RECORD_EVERY`-th are recorded, and the last of these recordings is
kept: that of a short run is not from its start, where iterations are slower. Iterations that were chosen by
number are all recorded and kept. An iteration ends when the next one begins: the optimizer step belongs to it.

The clock of a rank on another host drifts, so its offset to rank 0's clock is measured soon after a recorded iteration, but never
between two recorded ones: the measurement makes the ranks wait for each other, which must not show in a recording.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch.distributed as dist

from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.timeline import RankTimeline, Timeline
from megatron.zerobubble.profiling.recorder import OpRecorder

RECORD_EVERY = 20
"""Default number of training iterations from one recorded to the next. Recording costs two clock readings per op and two per
transfer."""

EARLY = (2, 4, 7, 12)
"""Numbers, counted from the start of the run, of the early iterations that are recorded by default."""


@dataclass(frozen=True, kw_only=True)
class _Recording:
    iteration: int
    plan: Plan
    own: Callable[[], RankTimeline]
    """Reads this rank's part, on its own clock. Synchronizes a CUDA device, which would stall the iterations in between."""
    is_disturbed: bool
    """Whether something else was measured, so that the peak of memory is not the iteration's own."""
    offset_ms: float | None = None
    """What to add to get times on rank 0's clock; None before it was measured."""


class Recordings:
    """The recorded iterations of one rank.

    Args:
        recorder: records one iteration at a time.
        clock_offset_ms: measures what to add to this rank's clock to get rank 0's; all ranks of the pipeline call it together.
    """

    def __init__(self, recorder: OpRecorder, clock_offset_ms: Callable[[], float]) -> None:
        self._recorder = recorder
        self._clock_offset_ms = clock_offset_ms
        self.every = RECORD_EVERY
        """Training iterations from one recorded to the next, from the second on. The first is recorded only if it was chosen."""
        self.only_chosen = False
        """Whether no iteration is recorded that was not chosen."""
        self.is_asked = False
        """Whether the next training iteration is recorded even if something else measures in it."""
        self._chosen: frozenset[int] = frozenset()
        self._iteration = 0
        self._current: tuple[int, Plan, bool] | None = None
        self._kept: list[_Recording] = []

    def choose(self, iterations: Iterable[int]) -> None:
        """Choose the iterations to record and keep, from 1 on, before the first one. All ranks must choose the same."""
        self._chosen = frozenset(iterations)

    @property
    def begun(self) -> int:
        """Number of the training iteration that has begun last."""
        return self._iteration

    @property
    def is_empty(self) -> bool:
        """Whether no iteration is recorded."""
        return self._current is None and not self._kept

    def begin(self, plan: Plan, *, is_disturbed: bool = False) -> OpRecorder | None:
        """Begin a training iteration, which completes the recording of the one before. Call it in every training iteration.

        Args:
            plan: the plan that the iteration runs.
            is_disturbed: something else measures in it, which costs time: record it only if it was chosen.

        Returns:
            The recorder for the executor if this iteration is recorded, otherwise None.
        """
        self._finish()
        self._iteration += 1
        # Not the first iteration unless it was chosen: it pays for every allocation.
        is_due = self._iteration in EARLY or (self._iteration > 1 and (self._iteration - 2) % self.every == 0)
        is_due = (is_due and not self.only_chosen and not is_disturbed) or self.is_asked
        self.is_asked = False
        if self._iteration in self._chosen or is_due:
            self._current = self._iteration, plan, is_disturbed
            self._recorder.clear()
            return self._recorder
        if any(kept.iteration in self._chosen for kept in self._kept):
            self._align()
        return None

    def gather(self, group: dist.ProcessGroup | None, *, num_ranks: int) -> list[Timeline]:
        """Gather the kept recordings of all ranks on rank 0's clock. Every rank of `group` must call it.

        Args:
            group: the pipeline's process group.
            num_ranks: its size.

        Returns:
            The chosen iterations, or without any the last recorded one; empty if no iteration was recorded.
        """
        self._finish()
        self._align()
        chosen = [kept for kept in self._kept if kept.iteration in self._chosen]
        return [_gathered(kept, group, num_ranks) for kept in chosen or self._kept[-1:]]

    def latest(self, group: dist.ProcessGroup | None, *, num_ranks: int) -> Timeline | None:
        """Gather the last recording that is complete, as `gather`; None without any."""
        self._align()
        return _gathered(self._kept[-1], group, num_ranks) if self._kept else None

    def _finish(self) -> None:
        if self._current is None:
            return
        iteration, plan, is_disturbed = self._current
        self._current = None
        self._recorder.pause()
        self._kept = [kept for kept in self._kept if kept.iteration in self._chosen]
        own = self._recorder.reader()
        self._kept.append(_Recording(iteration=iteration, plan=plan, own=own, is_disturbed=is_disturbed))

    def _align(self) -> None:
        if any(kept.offset_ms is None for kept in self._kept):
            offset = self._clock_offset_ms()
            self._kept = [replace(kept, offset_ms=offset if kept.offset_ms is None else kept.offset_ms) for kept in self._kept]


def _gathered(kept: _Recording, group: dist.ProcessGroup | None, num_ranks: int) -> Timeline:
    own = replace(kept.own().shifted(kept.offset_ms or 0.0), host=socket.gethostname())
    if kept.is_disturbed:
        own = replace(own, peak_bytes=None)
    everyone = [own] * num_ranks
    dist.all_gather_object(everyone, own, group=group)
    return Timeline(iteration=kept.iteration, plan=kept.plan, ranks=tuple(everyone))
