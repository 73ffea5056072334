"""Run rounds on one rank: in every round each contender runs one iteration."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from megatron.zerobubble.plan.simulate import TimedOp
from tools.benchmarks.schedules.report import Sample


class Contender(Protocol):
    """A schedule under measurement, on one rank."""

    def iterate(self, num_microbatches: int) -> None:
        """Run one iteration on the CPU; it is complete when this returns."""

    def timed_ops(self) -> list[TimedOp]:
        """The ops of the last iteration with their times; empty if they are not recorded."""

    def loss(self) -> float | None:
        """Mean loss of the last iteration on the rank with the last stage, otherwise None."""


def run_rounds(contenders: Sequence[Contender], num_microbatches: int, rounds: int) -> list[list[Sample]]:
    """Measure the contenders in rounds. Every rank must call it with the same contenders.

    One warm-up round is not counted. Each round begins with another contender, so that none always runs after the same one.

    Returns:
        For each contender its samples on this rank, one per round.
    """
    samples: list[list[Sample]] = [[] for _ in contenders]
    for number in range(rounds + 1):
        for position in range(len(contenders)):
            place = (number + position) % len(contenders)
            sample = _run_one(contenders[place], num_microbatches)
            if number > 0:
                samples[place].append(sample)
    return samples


def _run_one(contender: Contender, num_microbatches: int) -> Sample:
    gc.collect()
    gc.disable()  # no contender pays for the garbage of another one, or for a scan of all live objects
    try:
        dist.barrier()
        start = time.perf_counter()
        contender.iterate(num_microbatches)
        end = time.perf_counter()
    finally:
        gc.enable()
    return Sample(start_ms=start * 1000.0, end_ms=end * 1000.0, ops=tuple(contender.timed_ops()), loss=contender.loss())
