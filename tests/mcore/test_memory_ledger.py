"""The memory ledger: what it reports, and real models on gloo ranks. Its long run is in test_gpu.py."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from tests.support import gpt
from tests.support.gpt import Case
from tests.support.memory_ledger import Held, RankLedger, train_watched
from tests.support.ranks import RankPool

ZBV = Case("zbv", 4, 5, num_chunks=2, num_layers=8)


def held(allocated: int = 10, reserved: int | None = 40, activations: int = 100) -> Held:
    return Held(allocated=allocated, reserved=reserved, inactive_split=7, activations=activations, workspace=3)


def ledger(*rows: Held, predicted: int = 100) -> RankLedger:
    return RankLedger(predicted=predicted, warmup=2, held=rows)


def test_what_may_grow_and_what_may_not() -> None:
    steady = ledger(held(1, 20), held(), held(9, 40, 101), held())
    assert steady.complaints() == []
    assert (steady.measured, steady.fragmentation) == (101, 30)
    assert steady.growth(lambda each: each.allocated) == 0
    assert ledger(held(), held(), held(11), held()).complaints() == ["allocated memory grew by 1 bytes after iteration 2"]
    assert ledger(held(), held(), held(), held(10, 42)).complaints() == ["reserved memory grew by 2 bytes after iteration 2"]
    grown = ledger(held(), held(), held(), held(10, 40, 102)).complaints()
    assert grown == ["the peak of activations grew by 2 bytes after iteration 2"]
    assert ledger(held(), held(), predicted=106).complaints() == ["activations took 100 bytes, and the plan predicts 106: -5.7%"]
    assert ledger(held(), held(), predicted=104).complaints() == []


@pytest.mark.claims(
    "Planning and measuring",
    "memory per rank over many iterations: nothing grows, the peak of activation memory is within 5 % of the plan's",
    "works, live tensors on the CPU",
)
def test_nothing_grows_and_the_plan_knows_the_peak(four_ranks: RankPool) -> None:
    for rank, found in enumerate(four_ranks.run(train_watched, ZBV, 3, 1)):
        assert found.complaints() == [], rank
        assert found.predicted > 0
        assert len({each.allocated for each in found.held}) == 1, "after every iteration the same is left"
        assert found.fragmentation is None


def _train_long(rank: int, case: Case) -> RankLedger:
    """With sequences of 256 tokens, whose scores are twice as large as everything else that a layer keeps."""
    with mock.patch.object(gpt, "SEQUENCE", 256):
        return train_watched(rank, case, 3, 1)


@pytest.mark.claims(
    "Planning and measuring",
    "the planner's peak of activation memory with torch's attention and with megatron-core's own, whose scores are twice as "
    "large as the rest, within 5 %",
    "works, live tensors on the CPU",
)
def test_the_plan_knows_that_the_scores_are_gone(four_ranks: RankPool) -> None:
    """Within 5 % of what is measured, with torch's attention and with megatron-core's own."""
    peaks = []
    for own in (False, True):
        ledgers = four_ranks.run(_train_long, replace(ZBV, own_attention=own))
        assert [each.complaints() for each in ledgers] == [[]] * 4
        peaks.append(max(each.predicted for each in ledgers))
    assert peaks[0] < 0.5 * peaks[1]


def test_a_leak_is_seen(four_ranks: RankPool) -> None:
    """Three ops of microbatch 0 on each of two stages, 400 bytes each, in two iterations after the warm-up."""
    for found in four_ranks.run(train_watched, ZBV, 3, 1, True):
        assert "allocated memory grew by 4800 bytes after iteration 1" in found.complaints()
