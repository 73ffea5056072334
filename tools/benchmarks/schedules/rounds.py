"""Iteration by iteration, every contender in turn, on one rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from megatron.zerobubble.plan.simulate import TimedOp
from tools.benchmarks.schedules.report import Sample


class Contender(Protocol):
    """Who takes turns, on one rank."""

    def iterate(self, num_microbatches: int) -> None:
        """One iteration. On the CPU: it has been computed when this returns."""

    def timed_ops(self) -> list[TimedOp]:
        """What ran when in it; nothing where that is not recorded."""

    def loss(self) -> float | None:
        """Of the last iteration, where there is one."""


def take_turns(contenders: Sequence[Contender], num_microbatches: int, rounds: int) -> list[list[Sample]]:
    """Per contender its samples on this rank. Every rank must call it with the same contenders.

    A first round is not counted. Each round begins with another contender, so that nobody always runs behind the same one.
    """
    samples: list[list[Sample]] = [[] for _ in contenders]
    for number in range(rounds + 1):
        for turn in range(len(contenders)):
            place = (number + turn) % len(contenders)
            sample = _take_turn(contenders[place], num_microbatches)
            if number > 0:
                samples[place].append(sample)
    return samples


def _take_turn(contender: Contender, num_microbatches: int) -> Sample:
    gc.collect()
    gc.disable()  # nobody pays for another's garbage, or for a look through all that is alive
    try:
        dist.barrier()
        start = time.perf_counter()
        contender.iterate(num_microbatches)
        end = time.perf_counter()
    finally:
        gc.enable()
    return Sample(start_ms=start * 1000.0, end_ms=end * 1000.0, ops=tuple(contender.timed_ops()), loss=contender.loss())
