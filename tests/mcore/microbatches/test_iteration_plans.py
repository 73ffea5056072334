"""Microbatches of unequal length against the unpipelined model, which takes the same samples in the order in which they come.

With the order of the data kept, bit for bit. Where the plan runs them in another order, the sum of the gradients has another
order, too: 4e-6. The losses come back in the order of the data, and each is the same bits: a forward sees one microbatch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.comparisons import assert_near, compare
from tests.support.gpt import Case
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER
from tests.support.unequal import (
    UnequalCase,
    UnequalMoeCase,
    evaluate_unequal,
    give_wrong_lengths,
    read_different_data,
    read_different_data_per_chunk,
    read_too_little,
    record_exchanges,
    replan_unequal,
    train_unequal,
)

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "microbatches at their own lengths: 1F1B, interleaved 1F1B, ZB-H1, ZB-H2, ZB, ZBV, V-Half on 2 and 4 ranks against the "
    "unpipelined model; tensor, sequence, context and data parallelism, overlapped reductions, recomputation, "
    "tied embeddings, evaluation, re-planning",
    "works, bit for bit in the order of the data, within 4e-6 in the plan's",
)

SCHEDULES = [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-h2", 1), ("zbv", 2), ("v-half", 2)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
@pytest.mark.sampled(0.16)
def test_same_gradients_in_the_order_of_the_plan(four_ranks: RankPool, schedule: str, num_chunks: int, num_ranks: int) -> None:
    case = UnequalCase(schedule, num_ranks, 2 * num_ranks, num_chunks=num_chunks, adam_eps=1.0)
    assert_near(four_ranks.run(compare, case), case, OTHER_ORDER)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
@pytest.mark.sampled(0.16)
def test_same_bits_in_the_order_of_the_data(four_ranks: RankPool, schedule: str, num_chunks: int, num_ranks: int) -> None:
    case = UnequalCase(schedule, num_ranks, 2 * num_ranks, num_chunks=num_chunks, reorders=False)
    assert_near(four_ranks.run(compare, case), case)


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


ZBV = UnequalCase("zbv", 2, 6, num_chunks=2, adam_eps=1.0)


@pytest.mark.parametrize(
    "case",
    [
        replace(ZBV, tensor_parallel=2),
        replace(ZBV, tensor_parallel=2, sequence_parallel=True, multiple=2, llama=True),
        replace(ZBV, context_parallel=2, multiple=4, llama=True),
        replace(ZBV, different_data=True),
        replace(ZBV, different_data=True, overlap_grad_reduce=True, per_token_loss=True),
        replace(ZBV, recompute="full", tied=True),
        UnequalCase("zb", 4, 6, max_pending_backward=5, adam_eps=1.0),
        UnequalMoeCase("zbv", 2, 6, num_chunks=2, adam_eps=1.0, expert_parallel=2, different_data=True, per_token_loss=True),
    ],
    ids=["tp2", "sp2", "cp2", "dp2", "dp2-overlapped", "recomputed-tied", "zb", "ep2"],
)
@pytest.mark.sampled(0.22)
def test_same_gradients_with(four_ranks: RankPool, case: UnequalCase) -> None:
    """Data-parallel replicas have lengths of their own, and each another assignment to the one order of ops."""
    assert_near(four_ranks.run(compare, case), case, OTHER_ORDER)  # of the mean over replicas the order differs, too


def test_replicas_run_one_order_of_ops_with_assignments_of_their_own(four_ranks: RankPool) -> None:
    case = replace(ZBV, different_data=True, num_steps=2)
    outcomes = four_ranks.run(train_unequal, case)
    orders = [orders for _, orders in outcomes]
    replicas = [rank % 2 for rank in range(4)]
    assert orders[replicas.index(0)] != orders[replicas.index(1)]
    for replica in (0, 1):
        assert len({str(order) for order, own in zip(orders, replicas, strict=True) if own == replica}) == 1


def test_lengths_are_exchanged_once_before_the_first_pass(four_ranks: RankPool) -> None:
    """Then plans are compared, but for the third step, whose lengths are equal."""
    forwards = " ".join(["F"] * 12)
    for steps in four_ranks.run(record_exchanges, replace(ZBV, num_ranks=4)):
        assert steps == [*[f"lengths plans {forwards}"] * 2, f"lengths {forwards}"]


def test_evaluation_keeps_the_order_of_the_data(four_ranks: RankPool) -> None:
    """The losses of the same data and weights, in its order; nothing is planned."""
    for evaluated, trained, order in four_ranks.run(evaluate_unequal, replace(ZBV, num_ranks=4)):
        assert evaluated == trained
        assert order == tuple(range(6))


def test_replanning_fits_times_to_lengths(four_ranks: RankPool) -> None:
    """With measured times all ranks plan alike, for costs that grow with the length; a recording has every op."""
    case = replace(ZBV, num_ranks=4, num_steps=5)
    found = four_ranks.run(replan_unequal, case)
    assert len({each.orders for each in found}) == 1
    assert len({each.model for each in found}) == 1
    assert all(each.has_learned for each in found)
    assert all(each.is_kept for each in found), "for the report"
    assert all(each.grows for each in found)
    assert found[0].num_recorded == 4 * 6 * 6, "F, B and W of six microbatches on two stages of four ranks"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (read_different_data, r"ranks 0 and 3 of data-parallel replica 0 read different data: microbatch \d has \d+ tokens on"),
        (give_wrong_lengths, r"stage 0, microbatch \d: the output has shape .*, and .* follows from the \d+ tokens that"),
    ],
)
def test_ranks_that_do_not_agree(four_ranks: RankPool, function: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        four_ranks.run(function, replace(ZBV, num_ranks=4))  # type: ignore[arg-type]


def test_an_iterator_that_ends(four_ranks: RankPool) -> None:
    """Ranks that read no data fail with the one that could not, instead of waiting for it."""
    first, *others = four_ranks.run(read_too_little, replace(ZBV, num_ranks=4))
    assert first == (
        "DataError: the data iterator ended after 2 of the 6 microbatches of an iteration; give one that has them all, for "
        "example one that begins again at its end"
    )
    expected = "ExecutionError: rank 0 could not read the microbatches of this iteration; the error there says why"
    assert others == [expected] * 3


def test_chunks_that_read_different_data(four_ranks: RankPool) -> None:
    for message in four_ranks.run(read_different_data_per_chunk, replace(ZBV, num_ranks=4)):
        assert "ConfigError: the data iterators of this rank's chunks read different data: microbatch " in message


def test_a_length_that_ranks_cannot_share(four_ranks: RankPool) -> None:
    case: Case = replace(ZBV, tensor_parallel=2, sequence_parallel=True, llama=True)
    with pytest.raises(AssertionError, match=r"tokens, and sequence parallelism over 2 ranks needs a multiple of 2: pad it"):
        four_ranks.run(train_unequal, case)
