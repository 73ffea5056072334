"""Unequal microbatches in a loop of your own: slices of them, numbers of microbatches, evaluation, re-planning, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Slices
from megatron.zerobubble.mcore.slices.batches import cut_batch
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.plan.costs.length_model import Work
from megatron.zerobubble.plan.costs.slicing import TILE, CutRule
from tests.support.comparisons import error_of, message_of
from tests.support.ranks import RankPool
from tests.support.sliced import SlicedUnequalCase
from tests.support.stock import losses_of, tokens_of, train_unequal
from tests.support.tolerances import OTHER_ORDER
from tests.support.unequal import evaluate_unequal, replan_unequal

LOOP = "--num-layers 4 --hidden-size 32 --train-iters 3 --num-microbatches 6 --lr 1e-4 --pipeline-model-parallel-size 2"
CHUNKS = "--virtual-pipeline-model-parallel-size 2"
IN_ORDER = MicrobatchLengths(tokens_of, reorder=False)
ZBV = SlicedUnequalCase("zbv", 4, 6, num_chunks=2, num_layers=8, num_slices=4, adam_eps=1.0)


def counts_of(rank: int, case: SlicedUnequalCase) -> tuple[list[list[int]], list[list[int]]]:
    """Per step the lengths of the microbatches in the order of the plan, and their numbers of slices."""
    trainer: Any = case.trainer()
    lengths = []
    for step in range(case.num_steps):
        trainer.forward_backward(step)
        own = case.lengths(step, 0)
        lengths.append([own[place] for place in trainer.orders[-1]])
    slices = list(map(list, trainer.slices))
    trainer.close()
    return lengths, slices


def test_long_microbatches_have_more_slices_than_short_ones(four_ranks: RankPool) -> None:
    found = four_ranks.run(counts_of, replace(ZBV, num_steps=4))
    assert all(each == found[0] for each in found)
    lengths, slices = found[0]
    for own, counts in zip(lengths, slices, strict=True):
        assert counts == [min(each, max(1, round(4 * each / max(own)))) for each in own]
    assert len(set(slices[0])) > 1
    assert set(slices[2]) == {2}, "sequences of two tokens have no four slices"


def test_evaluation_has_the_slices_that_training_has(four_ranks: RankPool) -> None:
    for evaluated, trained, order in four_ranks.run(evaluate_unequal, ZBV):
        assert evaluated == pytest.approx(trained, rel=OTHER_ORDER)
        assert order == tuple(range(6))


def test_replanning_fits_times_to_the_lengths_of_slices(four_ranks: RankPool) -> None:
    found = four_ranks.run(replan_unequal, replace(ZBV, num_steps=5))
    assert len({each.orders for each in found}) == 1
    assert len({each.model for each in found}) == 1
    assert all(each.has_learned and each.is_kept and each.grows for each in found)
    assert found[0].num_recorded > 4 * 6 * 6, "F, B and W of more slices than six"


def pack(rank: int, case: SlicedUnequalCase) -> str:
    """The error of this rank where rows have two sequences."""
    trainer: Any = case.trainer()
    unequal = trainer.schedule.unequal
    unequal._options = replace(unequal._options, tokens_of=lambda item: (item["tokens"].size(1), 1.0))
    return error_of(trainer)


def test_packed_sequences_are_refused_on_all_ranks(four_ranks: RankPool) -> None:
    for error in four_ranks.run(pack, ZBV):
        assert "slices do not go with packed sequences" in error


def test_no_more_slices_than_the_shortest_replica_has_tokens_for() -> None:
    rule = CutRule(work=Work(per_token=64.0, per_square=1.0), multiple=2, tile=TILE)
    assert rule.counts([64, 32, 16, 4], 8) == (8, 3, 1, 1)
    assert rule.counts([64, 32, 16, 4], 8, [6, 4, 2, 2]) == (3, 2, 1, 1)
    assert [part.length for part in SliceOptions(rule=rule).parts(6, 3)] == [2, 2, 2]


def test_nested_tensors_are_not_cut() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged)
    with pytest.raises(ConfigError, match="is a nested tensor"):
        cut_batch({"tokens": nested}, SliceOptions().parts(8, 2)[0])


@pytest.mark.claims(
    "Your own script",
    "in a loop of your own: slices of microbatches with lengths of their own (`install(slices=, lengths=)`), two "
    "replicas with different ones, ZB-H1 and ZBV",
    "works, 1e-4 after three steps",
)
@pytest.mark.claims(
    "Planning and measuring",
    "`install(lengths=)` against megatron-core's own 1F1B with `variable_seq_lengths`, two replicas with lengths of"
    " their own, also with post-validation",
    "works, first losses bit for bit",
)
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ("", {"schedule": "zb-h1"}),
        (f"{CHUNKS} --overlap-grad-reduce --use-distributed-optimizer", {"schedule": "zbv"}),
        (CHUNKS, {"schedule": "zbv", "optimizer_post_validation": True}),
        ("", {"schedule": "1f1b", "lengths": IN_ORDER}),
        ("", {"schedule": "zb-h1", "slices": Slices(4), "lengths": IN_ORDER}),
        (CHUNKS, {"schedule": "zbv", "slices": Slices(2), "optimizer_post_validation": True}),
    ],
    ids=["zb-h1", "zbv", "post-validation", "in-order", "slices-zb-h1-in-order", "slices-zbv-post-validation"],
)
@pytest.mark.sampled(0.34)
def test_unequal_microbatches(four_ranks: RankPool, more: str, options: dict[str, Any]) -> None:
    """The losses of megatron-core's own 1F1B with variable_seq_lengths, in the order of the data, on two replicas."""
    expected = losses_of(four_ranks.run(train_unequal, LOOP, {}))
    actual = losses_of(four_ranks.run(train_unequal, f"{LOOP} {more}", options))
    assert len(expected) == 2
    for own, reference in zip(actual, expected, strict=True):
        if "slices" in options:
            assert own == [pytest.approx(losses, rel=1e-4) for losses in reference]
        elif "lengths" in options:
            assert own == reference
        else:
            assert own[0] == reference[0], "a forward pass sees one microbatch, whenever it runs"
            assert own[1:] == [pytest.approx(losses, rel=1e-4) for losses in reference[1:]]


def test_lengths_that_are_not_known(four_ranks: RankPool) -> None:
    for message in four_ranks.run(message_of, train_unequal, LOOP, {"schedule": "zb-h1", "lengths": None}):
        assert re.search(r"variable_seq_lengths .* schedule 'zb-h1'.*give .*install lengths=", message)
