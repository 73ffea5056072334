"""Pass times of a window of iterations, and the costs that follow from them.

Every rank times its own passes (`PassTimer`): two marks an op, read once when the window is over, so that timing does not
serialise what it measures. A mark is a clock reading on the CPU and an event on the current stream on CUDA; there the first mark
of an op comes after the stream's wait for its input, so the time in between is the pass alone.

From the typical time of each stage's F, B and W on every rank follows one `CostModel` (`combine`). A stage that several ranks
hold (tensor, data parallelism) takes as long as its slowest member.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Placement

PassTimes = Mapping[tuple[int, OpKind], float]
"""(stage, kind) -> milliseconds, on one rank."""


class PassTimer:
    """Times the passes of one rank.

    Args:
        device: decides how time is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[Op, Any, Any]] = []
        self._started: Any = None

    def start(self, op: Op) -> None:
        """The op's input is here and it is about to run."""
        self._started = self._now()

    def end(self, op: Op) -> None:
        """The op's work has been issued (CUDA) or done (CPU)."""
        self._marks.append((op, self._started, self._now()))

    def typical(self) -> dict[tuple[int, OpKind], float]:
        """The median time of each stage's ops of each kind in milliseconds; forgets them. Synchronises a CUDA device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        times: dict[tuple[int, OpKind], list[float]] = {}
        for op, start, end in self._marks:
            elapsed = start.elapsed_time(end) if self._on_cuda else (end - start) * 1000.0
            times.setdefault((op.stage, op.kind), []).append(elapsed)
        self._marks.clear()
        return {key: median(values) for key, values in times.items()}

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def combine(ranks: Iterable[PassTimes], placement: Placement, *, link_ms: Sequence[float] = ()) -> CostModel:
    """The costs of a pipeline from what its ranks measured. Activations count as equal, and as held until W.

    Args:
        ranks: pass times of every rank that holds a stage, in any order; several for a stage that several ranks hold.
        placement: stage -> rank.
        link_ms: time of each link, in milliseconds; their mean is the plan's `comm_ms`.

    Raises:
        ExecutionError: nobody timed a stage's F, or its B.
    """
    slowest: dict[tuple[int, OpKind], float] = {}
    for times in ranks:
        for key, elapsed in times.items():
            slowest[key] = max(elapsed, slowest.get(key, 0.0))

    def of(*kinds: OpKind, optional: bool = False) -> tuple[float, ...]:
        found = [[slowest[stage, kind] for kind in kinds if (stage, kind) in slowest] for stage in range(placement.num_stages)]
        if not optional and not all(found):
            raise ExecutionError(f"no {kinds[0].value} of stage {found.index([])} was timed")
        return tuple(map(sum, found))

    share = tuple(1.0 / len(placement.rank_to_stages[rank]) for rank in placement.stage_to_rank)
    return CostModel(
        forward_ms=of(OpKind.F),
        backward_ms=of(OpKind.B, OpKind.BW),
        wgrad_ms=of(OpKind.W, optional=True),
        comm_ms=fmean(link_ms) if link_ms else 0.0,
        activation=share,
        activation_after_backward=share,
    )
