"""Measure pass times and memory on one rank over a window of iterations.

Two marks per op, read once at the end of the window, so that timing does not serialize what it measures. A mark is a clock
reading on the CPU and an event on the current stream on CUDA; there the first mark of an op comes after the stream's wait for
its input, so the time between the two is the pass alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.profiling.exposed import exposed
from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.profiling.profile import ByLength, RankProfile, StageMemory, slices_of
from megatron.zerobubble.runtime.recording import Recorder


class _Pass(NamedTuple):
    op: Op
    start: Any
    end: Any
    lengths: Sequence[Sequence[tuple[int, float]]]
    changes: Sequence[tuple[Any, int]]


class Profiler(Recorder):
    """Times the passes of one rank, and measures the memory of the first iteration. Enter it around every iteration.

    Args:
        device: decides how time and bytes are measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.lengths: Sequence[Sequence[tuple[int, float]]] = ()
        """(tokens, squares) of every pass of each microbatch of the plan in the next iteration, that is one, or as many as it has
        slices; empty: all microbatches are equal."""
        self.key_bytes: Mapping[int, int] = {}
        """Where microbatches are cut: for each stage of this rank, the bytes of a microbatch's keys and values."""
        self._marks = Marks(device)
        self._passes: list[_Pass] = []
        self._measured: Sequence[Sequence[tuple[int, float]]] = ()
        self._started: Any = None
        self._changes: list[tuple[Any, int]] = []
        """Of the op that runs: when it began or ceased to compute."""
        self._meter = MemoryMeter(device)
        self._iterations = self._begin = 0
        self._entered = ExitStack()

    def __enter__(self) -> Profiler:
        self._iterations += 1
        if self._iterations == 2 and not self._marks.on_cuda:
            self._passes.clear()  # counting bytes took longer than the passes
        self._begin = len(self._passes)
        if self._iterations == 1:
            self._measured = self.lengths
            self._entered.enter_context(self._meter)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def rewind(self) -> None:
        """Discard this iteration, which begins again."""
        del self._passes[self._begin :]
        if self._iterations == 1:
            self._meter.clear()

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        """The op's result has been handed to its consumer."""
        if self._iterations == 1:
            self._meter.settled(op, in_transit)

    def start(self, op: Op) -> None:
        """The op's input is here and it is about to run."""
        self._changes = []
        self._started = self._marks.now()

    def computes(self, change: int) -> None:
        """The op computes from here on (1), or its tokens travel to or from experts (-1)."""
        self._changes.append((self._marks.now(), change))

    def end(self, op: Op) -> None:
        """The op's work has been issued (CUDA) or done (CPU)."""
        self._passes.append(_Pass(op, self._started, self._marks.now(), self.lengths, self._changes))

    def profile(self) -> RankProfile:
        """The median time of each stage's ops by kind, that of their all-to-alls, and its activation memory. Synchronizes a CUDA
        device."""
        self._marks.synchronize()
        times: dict[tuple[int, OpKind], list[float]] = {}
        shares: dict[tuple[int, OpKind], list[float]] = {}
        sliced: dict[tuple[int, OpKind, int], list[float]] = {}
        timed: dict[tuple[int, OpKind], list[ByLength[float]]] = {}
        whole: dict[tuple[int, Op], float] = {}
        for op, start, end, lengths, changes in self._passes:
            elapsed, key = self._marks.elapsed_ms(start, end), (op.stage, op.kind)
            times.setdefault(key, []).append(elapsed)
            if changes and elapsed > 0:
                apart = exposed(1, 0.0, elapsed, [(self._marks.elapsed_ms(start, at), change) for at, change in changes])
                shares.setdefault(key, []).append(math.fsum(until - since for since, until in apart) / elapsed)
            sliced.setdefault((*key, op.slice), []).append(elapsed)
            if lengths:
                timed.setdefault(key, []).append(ByLength(*lengths[op.microbatch][op.slice], elapsed))
                of_microbatch = id(lengths), op._replace(slice=0)  # `lengths` are those of one iteration
                whole[of_microbatch] = whole.get(of_microbatch, 0.0) + elapsed
        if whole:
            times.clear()
        for (_, op), elapsed in whole.items():
            times.setdefault((op.stage, op.kind), []).append(elapsed)
        typical, memory, slices = {key: median(values) for key, values in times.items()}, self._meter.typical(), {}
        if any(index for *_, index in sliced) and timed:
            for stage, held in self._meter.of_microbatches().items():
                memory[stage] = StageMemory(
                    activation=median(each.activation for each in held),
                    after_backward=median(each.after_backward for each in held),
                )
        elif any(index for *_, index in sliced):
            slices = slices_of({key: median(values) for key, values in sliced.items()})
            typical = {(stage, kind): sum(each) for stage, of in slices.items() for kind, each in of.times_ms.items()}
            for stage, of_slices in self._meter.of_slices(self.key_bytes).items():
                keys = self.key_bytes.get(stage, 0)
                slices[stage] = replace(slices[stage], memory=of_slices, key_bytes=keys)
                memory[stage] = StageMemory(
                    activation=keys + sum(each.activation for each in of_slices),
                    after_backward=sum(each.after_backward for each in of_slices),
                )
        return RankProfile(
            times_ms=typical,
            all_to_all_ms={key: typical[key] * median(values) for key, values in shares.items()},
            memory=memory,
            slices=slices,
            peak_bytes=self._meter.peak_bytes,
            workspace_bytes=self._meter.workspace_bytes,
            most_bytes=self._meter.most_bytes,
            timed={key: tuple(values) for key, values in timed.items()},
            measured=self._by_length(),
        )

    def _by_length(self) -> dict[int, tuple[ByLength[StageMemory], ...]]:
        """The memory of the first iteration's microbatches but the first one, which allocates more, if there are others."""
        if not self._measured:
            return {}
        whole = [(sum(tokens for tokens, _ in own), sum(squares for _, squares in own)) for own in self._measured]
        first = 1 if len(whole) > 1 else 0
        return {
            stage: tuple(ByLength(*own, memory) for own, memory in zip(whole, held, strict=True))[first:]
            for stage, held in self._meter.of_microbatches().items()
        }
