"""Microbatches of unequal length against the unpipelined model, which takes the same samples in the order in which they come.

With the order of the data kept, bit for bit. Where the plan runs them in another order, the sum of the gradients has another
order, too: 1e-6. The losses come back in the order of the data, and each is the same bits: a forward sees one microbatch.
"""

from __future__ import annotations

import pytest

from tests.support.ranks import RankPool
from tests.support.unequal import UnequalCase, compare_unequal, train_unequal

SCHEDULES = [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-h2", 1), ("zbv", 2), ("v-half", 2)]


@pytest.mark.parametrize("announces", [False, True], ids=["exchanged", "announced"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
@pytest.mark.sampled(0.34)
def test_same_gradients_in_the_order_of_the_plan(
    four_ranks: RankPool, schedule: str, num_chunks: int, num_ranks: int, announces: bool
) -> None:
    case = UnequalCase(schedule, num_ranks, 2 * num_ranks, num_chunks=num_chunks, announces=announces, adam_eps=1.0)
    for rank, difference in enumerate(four_ranks.run(compare_unequal, case)):
        assert difference.gradients < 1e-6, (rank, difference)
        assert difference.weights < 1e-6, (rank, difference)
        assert difference.losses < 1e-5, (rank, difference)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
@pytest.mark.sampled(0.34)
def test_same_bits_in_the_order_of_the_data(four_ranks: RankPool, schedule: str, num_chunks: int, num_ranks: int) -> None:
    case = UnequalCase(schedule, num_ranks, 2 * num_ranks, num_chunks=num_chunks, reorders=False)
    for rank, difference in enumerate(four_ranks.run(compare_unequal, case)):
        assert difference.unequal == (), (rank, difference)
        assert (difference.losses, difference.weights) == (0.0, 0.0), (rank, difference)


def test_microbatches_are_reordered_and_equal_ones_are_not(four_ranks: RankPool) -> None:
    """All ranks find the same order, whichever reads the data; in the third step all lengths are equal."""
    case = UnequalCase("zbv", 4, 8, num_chunks=2)
    orders = [orders for _, orders in four_ranks.run(train_unequal, case)]
    assert all(each == orders[0] for each in orders)
    first, second, third = orders[0]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != third
    assert first != second
    assert third == tuple(range(8))
