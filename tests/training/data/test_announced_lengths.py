"""Which iterations a run announces the lengths of, and with which samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zerobubble.training.data import announced_lengths as lengths
from megatron.zerobubble.training.data.announced_lengths import announce_lengths


class Announced:
    """What is expected of the schedule, as `UnequalMicrobatches` counts it."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.num_expected = 0

    def expect(self, replicas: Any) -> None:
        """Keep what is announced."""
        self.all.append(replicas)
        self.num_expected += 1


def run(monkeypatch: pytest.MonkeyPatch, *, iterations: int) -> list[list[Any]]:
    """Announce for iterations of 3 microbatches of 2 samples on 2 replicas; per iteration what was announced before it."""
    settings: Any = SimpleNamespace(
        batch=SimpleNamespace(micro_batch_size=2),
        data_parallel_size=2,
        global_batch_size=12,
        num_microbatches=3,
        run=SimpleNamespace(train_iters=iterations),
    )

    def microbatch_lengths(dataset: Any, settings: Any, *, consumed: int, num_microbatches: int, rank: int) -> Any:
        assert (dataset, num_microbatches) == ("samples", 3)
        return [(consumed, 100.0 * rank)] * num_microbatches

    monkeypatch.setattr(lengths, "microbatch_lengths", microbatch_lengths)
    unequal: Any = Announced()
    before = []
    for iteration in range(iterations):
        unequal.all = []
        announce_lengths(unequal, "samples", settings, iteration=iteration, consumed=12 * iteration)
        before.append([replicas[0][0].tokens for replicas in unequal.all])
        for replicas in unequal.all:
            assert [len(each) for each in replicas] == [3, 3]
            assert [each[0].squares for each in replicas] == [0.0, 50.0], "per row, of each replica"
        unequal.num_expected -= 1  # the iteration begins
    assert unequal.num_expected == 0
    return before


def test_each_iteration_is_announced_once_and_the_next_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, iterations=4) == [[0, 12], [24], [36], []]
    assert run(monkeypatch, iterations=1) == [[0]]
