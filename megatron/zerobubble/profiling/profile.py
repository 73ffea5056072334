"""Pass times and memory of a window of iterations, and the costs that follow from them.

Every rank times its own passes (`Profiler`): two marks an op, read once when the window is over, so that timing does not
serialise what it measures. A mark is a clock reading on the CPU and an event on the current stream on CUDA; there the first mark
of an op comes after the stream's wait for its input, so the time in between is the pass alone.

From the typical time of each stage's F, B and W on every rank follows one `CostModel` (`combine`). A stage that several ranks
hold (tensor, data parallelism) takes as long as its slowest member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Placement
from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.profiling.memory import MemoryMeter, StageMemory
from megatron.zerobubble.runtime.recording import Recorder


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """What one rank measured."""

    times_ms: Mapping[tuple[int, OpKind], float]
    """(stage, kind) -> milliseconds."""
    memory: Mapping[int, StageMemory]
    """Stage -> what a microbatch of it holds; empty where no memory was measured."""
    peak_bytes: int = 0
    """Most activation memory that was held after any op of the iteration whose memory was measured."""
    workspace_bytes: int = 0
    """What there was on top of that while ops ran."""


class Profiler(Recorder):
    """Times the passes of one rank, and measures the memory of its first iteration. To be entered around every iteration.

    Args:
        device: decides how time and bytes are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks = Marks(device)
        self._passes: list[tuple[Op, Any, Any]] = []
        self._started: Any = None
        self._meter = MemoryMeter(device)
        self._iterations = self._begin = 0
        self._entered = ExitStack()

    def __enter__(self) -> Profiler:
        self._iterations += 1
        if self._iterations == 2 and not self._marks.on_cuda:
            self._passes.clear()  # counting bytes took longer than the passes
        self._begin = len(self._passes)
        if self._iterations == 1:
            self._entered.enter_context(self._meter)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def rewind(self) -> None:
        """Forget this iteration, which begins again."""
        del self._passes[self._begin :]
        if self._iterations == 1:
            self._meter.clear()

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        """The op's result has been handed on."""
        if self._iterations == 1:
            self._meter.settled(op, in_transit)

    def start(self, op: Op) -> None:
        """The op's input is here and it is about to run."""
        self._started = self._marks.now()

    def end(self, op: Op) -> None:
        """The op's work has been issued (CUDA) or done (CPU)."""
        self._passes.append((op, self._started, self._marks.now()))

    def profile(self) -> RankProfile:
        """The typical time of each stage's ops of each kind, and what it holds. Synchronises a CUDA device."""
        self._marks.settle()
        times: dict[tuple[int, OpKind], list[float]] = {}
        for op, start, end in self._passes:
            times.setdefault((op.stage, op.kind), []).append(self._marks.elapsed_ms(start, end))
        return RankProfile(
            times_ms={key: median(values) for key, values in times.items()},
            memory=self._meter.typical(),
            peak_bytes=self._meter.peak_bytes,
            workspace_bytes=self._meter.workspace_bytes,
        )


def combine(ranks: Sequence[RankProfile], placement: Placement, *, link_ms: Sequence[float] = ()) -> CostModel:
    """The costs of a pipeline from what its ranks measured.

    Args:
        ranks: of every rank that holds a stage, in any order; several for a stage that several ranks hold.
        placement: stage -> rank.
        link_ms: time of each link, in milliseconds; their mean is the plan's `comm_ms`.

    Raises:
        ExecutionError: nobody timed a stage's F, or its B.
    """
    slowest: dict[tuple[int, OpKind], float] = {}
    for rank in ranks:
        for key, elapsed in rank.times_ms.items():
            slowest[key] = max(elapsed, slowest.get(key, 0.0))

    def of(*kinds: OpKind, optional: bool = False) -> tuple[float, ...]:
        found = [[slowest[stage, kind] for kind in kinds if (stage, kind) in slowest] for stage in range(placement.num_stages)]
        if not optional and not all(found):
            raise ExecutionError(f"no {kinds[0].value} of stage {found.index([])} was timed")
        return tuple(map(sum, found))

    activation, after_backward = _shares(ranks, placement)
    return CostModel(
        forward_ms=of(OpKind.F),
        backward_ms=of(OpKind.B, OpKind.BW),
        wgrad_ms=of(OpKind.W, optional=True),
        comm_ms=fmean(link_ms) if link_ms else 0.0,
        activation=activation,
        activation_after_backward=after_backward,
    )


def unit_bytes(ranks: Sequence[RankProfile], placement: Placement) -> float:
    """Bytes of one unit of a plan's memory: a microbatch on a rank with an equal part of the model. 0: not measured."""
    return math.fsum(_largest(ranks, stage).activation for stage in range(placement.num_stages)) / placement.num_ranks


def costs_within(costs: CostModel, placement: Placement, num_microbatches: int, rooms: Sequence[float]) -> CostModel:
    """The same costs, with memory in units in which every rank's room is 1.

    A plan that keeps the memory limit 1 under these costs keeps every rank within its own room.

    Args:
        costs: activations in units of one microbatch on a rank with an equal part of the model.
        placement: stage -> rank.
        num_microbatches: m, which a plan's memory is relative to where it is less than p.
        rooms: per rank, how many such units fit; above 0.
    """
    scales = [min(placement.num_ranks, num_microbatches) / rooms[rank] for rank in placement.stage_to_rank]
    return replace(
        costs,
        activation=tuple(value * scale for value, scale in zip(costs.activation, scales, strict=True)),
        activation_after_backward=tuple(
            value * scale for value, scale in zip(costs.activation_after_backward, scales, strict=True)
        ),
    )


def _shares(ranks: Sequence[RankProfile], placement: Placement) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What stages hold after F and after B, in units; where it was not measured, equal parts, held until W."""
    unit = unit_bytes(ranks, placement)
    if unit <= 0:
        equal = tuple(1.0 / len(placement.rank_to_stages[rank]) for rank in placement.stage_to_rank)
        return equal, equal
    held = [_largest(ranks, stage) for stage in range(placement.num_stages)]
    return tuple(each.activation / unit for each in held), tuple(each.after_backward / unit for each in held)


def _largest(ranks: Sequence[RankProfile], stage: int) -> StageMemory:
    """What the members of a stage hold at most."""
    members = [rank.memory[stage] for rank in ranks if stage in rank.memory]
    return StageMemory(
        activation=max((each.activation for each in members), default=0.0),
        after_backward=max((each.after_backward for each in members), default=0.0),
    )
