"""Clocks of ranks that share none: the offset found is the one that was put in."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from megatron.zerobubble.runtime.clock import clock_offset_ms
from tests.runtime.support import Fabric, ThreadLinks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("skews_ms", "expected_ms"),
    [([0.0], [0.0]), ([0.0, 1.0, 0.0], [0.0, 0.0, 0.0]), ([7.0, 5000.0, -300.0, 12.5], [0.0, -4993.0, 307.0, -5.5])],
)
def test_the_offset_undoes_the_skew(skews_ms: list[float], expected_ms: list[float]) -> None:
    """A clock for all ranks that advances by a millisecond whenever one of them reads its own: in the shortest round trip, three
    readings in a row, the reply lies exactly in the middle. A late rank makes earlier trips long, and they do not count. A skew
    of no more than half a trip could be the trip's own, and is left."""
    ticks = itertools.count()
    fabric = Fabric(seed=0)
    offsets: dict[int, float] = {}

    def rank(index: int) -> None:
        offsets[index] = clock_offset_ms(
            ThreadLinks(fabric), rank=index, num_ranks=len(skews_ms), device=CPU, clock=lambda: next(ticks) + skews_ms[index]
        )

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(len(skews_ms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    fabric.close()
    assert [offsets[index] for index in range(len(skews_ms))] == expected_ms
