"""Slices of microbatches against the unpipelined model that runs each microbatch in one piece.

Losses and gradients within 4e-6 of the largest entry. Three sums are taken in another order: the attention's gradients of keys
and values over the queries, each weight's gradient over the tokens (slice by slice, the last one first), and the loss's
quotient. So bits differ, as they do between two microbatch sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.comparisons import compare
from tests.support.ranks import RankPool
from tests.support.sliced import SlicedCase, SlicedMoeCase, SlicedUnequalCase
from tests.support.tolerances import OTHER_ORDER, after_steps

LOSS = 4 * after_steps(1, lr=1e-2)
"""Of a loss of about 4; the last one is after a step."""

ZB_H1 = SlicedCase("zb-h1", 2, 3, num_layers=4, num_slices=2)
ZBV = SlicedCase("zbv", 2, 3, num_chunks=2, num_layers=4, num_slices=4)
GRID = [
    SlicedCase(
        name, num_ranks, num_microbatches, num_chunks=2 if name.startswith(("zbv", "v-")) else 1, num_slices=n, llama=n == 4
    )
    for name in ("1f1b", "zb-h1", "zb-h2", "zb", "zbv", "v-half", "v-min")
    for num_ranks, num_microbatches in ((2, 1), (2, 3), (4, 4))
    for n in (2, 4)
]
SHARED_MOE = SlicedMoeCase(
    "zb-h1", 2, 2, num_layers=4, num_slices=2, tensor_parallel=2, sequence_parallel=True, layer_freq=(1,) * 4
)
OTHERS: list[Any] = [
    replace(ZB_H1, num_slices=12),
    replace(ZB_H1, num_slices=3, slice_lengths=(7, 3, 2)),
    replace(ZB_H1, own_attention=True),
    replace(ZBV, own_attention=True, llama=True),
    replace(ZB_H1, per_token_loss=True),
    replace(ZB_H1, recompute="full"),
    replace(ZBV, recompute="block"),
    replace(ZBV, recompute="selective"),
    replace(ZBV, tied=True, clip_grad=0.1, optimizer="sgd"),
    replace(ZB_H1, tensor_parallel=2),
    replace(ZBV, tensor_parallel=2, sequence_parallel=True, num_slices=2, llama=True),
    replace(ZBV, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    replace(ZB_H1, different_data=True, overlap_grad_reduce=True),
    SlicedMoeCase("zb-h1", 2, 3, num_layers=4, num_slices=4, aux_loss_coeff=0.0),
    SlicedMoeCase("zbv", 2, 3, num_chunks=2, num_layers=4, num_slices=2, aux_loss_coeff=0.0, expert_parallel=2, shared=True),
    SlicedMoeCase("zb-h1", 2, 3, num_layers=4, num_slices=4),
    SlicedMoeCase("zbv", 2, 3, num_chunks=2, num_layers=4, num_slices=2, balancing="seq_aux_loss", per_token_loss=True),
    SlicedMoeCase(
        "zbv", 2, 3, num_chunks=2, num_layers=4, num_slices=3, expert_parallel=2, recompute="full", slice_lengths=(6, 4, 2)
    ),
    replace(SHARED_MOE, balancing=("aux_loss", "seq_aux_loss"), aux_loss_coeff=(0.1, 0.05)),
    SlicedMoeCase("zbv", 2, 3, num_chunks=2, num_layers=4, num_slices=2, balancing="none", expert_bias=True, recompute="full"),
]


@pytest.mark.claims(
    "Schedules",
    "slices of microbatches, 2 and 4 of each: 1F1B, ZB-H1, ZB-H2, ZB, ZBV, V-Half and V-Min on 2 and 4 ranks, m from 1 to 4",
    "works, losses and gradients within 4e-6 of whole microbatches",
)
@pytest.mark.parametrize("case", GRID, ids=str)
@pytest.mark.sampled(0.15)
def test_slices_of_every_generator_have_the_loss_and_gradients_of_whole_microbatches(four_ranks: RankPool, case: Any) -> None:
    check(four_ranks, case)


@pytest.mark.claims(
    "Layers",
    "slices of microbatches, up to one per token and of unequal lengths: MHA, GQA; torch's and megatron-core's own "
    "attention; experts with their auxiliary losses and biases; full, block and selective recomputation; tied "
    "embeddings",
    "works, losses and gradients within 4e-6 of whole microbatches",
)
@pytest.mark.claims(
    "Parallelism",
    "slices of microbatches with tensor and sequence parallelism, expert parallelism, overlapped reduction, the distributed "
    "optimizer, per-token loss",
    "works, losses and gradients within 4e-6 of whole microbatches",
)
@pytest.mark.parametrize("case", OTHERS, ids=str)
@pytest.mark.sampled(0.2)
def test_slices_have_the_loss_and_gradients_of_whole_microbatches(four_ranks: RankPool, case: Any) -> None:
    check(four_ranks, case)


OF_LENGTHS = SlicedUnequalCase("zbv", 2, 4, num_chunks=2, num_layers=4, num_slices=4, adam_eps=1.0)
UNEQUAL: list[Any] = [
    OF_LENGTHS,
    replace(OF_LENGTHS, num_ranks=4, num_layers=8, num_microbatches=8, num_slices=3),
    replace(OF_LENGTHS, reorders=False, recompute="full", llama=True),
    replace(OF_LENGTHS, num_slices=12, tied=True),
    replace(OF_LENGTHS, tensor_parallel=2, sequence_parallel=True, multiple=2, num_slices=2, llama=True),
    replace(OF_LENGTHS, different_data=True, overlap_grad_reduce=True, per_token_loss=True),
    *(SlicedUnequalCase(name, 2, 5, num_layers=4, num_slices=4, adam_eps=1.0) for name in ("1f1b", "zb-h1", "zb-h2", "zb")),
    SlicedUnequalCase("v-half", 2, 5, num_chunks=2, num_layers=4, num_slices=4, adam_eps=1.0),
]


@pytest.mark.claims(
    "Schedules",
    "slices of microbatches with lengths of their own, more of long ones than of short ones, in another order in every step: "
    "1F1B, ZB-H1, ZB-H2, ZB, ZBV and V-Half on 2 and 4 ranks; recomputation, tensor, sequence and data parallelism",
    "works, losses and gradients within 4e-6 of whole microbatches",
)
@pytest.mark.parametrize("case", UNEQUAL, ids=str)
@pytest.mark.sampled(0.25)
def test_slices_of_unequal_microbatches_have_the_loss_and_gradients_of_whole_ones(four_ranks: RankPool, case: Any) -> None:
    check(four_ranks, case)


HALVES = [replace(ZBV, dtype=torch.bfloat16), replace(ZB_H1, dtype=torch.float16, loss_scale=1024.0, llama=True)]


@pytest.mark.claims("Precision and the optimizer", "slices of microbatches in bf16, and in fp16 with a loss scale", "works, 2 %")
@pytest.mark.parametrize("case", HALVES, ids=str)
@pytest.mark.sampled(0.5)
def test_slices_in_half_precision(four_ranks: RankPool, case: Any) -> None:
    for rank, each in enumerate(four_ranks.run(compare, case)):
        assert each.losses <= 2e-2, (rank, each)
        assert each.gradients <= 2e-2, (rank, each)


def check(ranks: RankPool, case: Any) -> None:
    found = ranks.run(compare, case)
    assert sum(each.num_losses for each in found) == case.num_microbatches * 4 // case.num_ranks, (
        "there is one report per microbatch"
    )
    for rank, each in enumerate(found):
        assert each.losses <= LOSS, (rank, each)
        assert each.gradients <= OTHER_ORDER or case.distributed_optimizer, (rank, each)
