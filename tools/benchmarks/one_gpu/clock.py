"""Measure on one clock, in rounds in which all contenders take turns, with cold caches.

On CUDA a time is the distance of two events on the stream. Nothing synchronizes inside a round, and each round begins with a
pause of the stream in which the host gets ahead, so that no gap between two kernels is caused by the host. Operands rotate: they
have left the cache since they were last read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from megatron.zerobubble.profiling.marks import Marks

LEAST_ROUNDS = 5
"""Rounds that count, however long they take."""
PAUSE_CYCLES = 40_000_000
"""Length of the pause of the stream, about 20 ms."""
T = TypeVar("T")


class Clock:
    """Measures times on one device.

    Args:
        device: the device on which the calls run.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks = Marks(device)
        self._spans: dict[str, list[tuple[object, object]]] = {}

    def time(self, name: str, call: Callable[[], object]) -> None:
        """Run `call`, and record its time under `name`."""
        begin = self._marks.now()
        call()
        self._spans.setdefault(name, []).append((begin, self._marks.now()))

    def get_ahead(self) -> None:
        """Pause the stream, so that the host queues work before the device begins with it."""
        if self._marks.on_cuda:
            torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until the device has run all calls."""
        self._marks.synchronize()

    def read(self, *, skip: int) -> dict[str, list[float]]:
        """Return the milliseconds by name, without the first `skip` of each, and clear them. Synchronizes the device."""
        self._marks.synchronize()
        spans, self._spans = self._spans, {}
        return {name: [self._marks.elapsed_ms(*span) for span in taken[skip:]] for name, taken in spans.items()}


def rounds(*, warmup: int, repeats: int | None = None, seconds: float = math.inf, least: int = LEAST_ROUNDS) -> Iterator[int]:
    """Number the rounds. After `seconds` of those that count, and `least` of them, none begins."""
    end, number = math.inf, 0
    while repeats is None or number < warmup + repeats:
        if number == warmup:
            end = time.monotonic() + seconds
        if number >= warmup + least and time.monotonic() > end:
            return
        yield number
        number += 1


def in_turn(contenders: Sequence[T], number: int) -> Sequence[T]:
    """All contenders; in the next round another one is first."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]
