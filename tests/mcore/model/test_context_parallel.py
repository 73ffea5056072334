"""Context parallelism: attention over slices of sequences on two ranks against whole sequences on one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.gpt import Case, Difference, compare
from tests.support.ranks import RankPool

ZB_H1 = Case("zb-h1", 2, 4, context_parallel=2, num_steps=2, adam_eps=1.0)
ZBV = replace(ZB_H1, schedule="zbv", num_chunks=2)
V_HALF = replace(ZBV, schedule="v-half")
TP = replace(ZB_H1, num_ranks=1, tensor_parallel=2, schedule="stock")

CASES = [
    ZB_H1,
    replace(ZBV, llama=True),
    replace(V_HALF, distributed_optimizer=True, overlap_grad_reduce=True, clip_grad=0.1),
    replace(ZBV, distributed_optimizer=True, shard_gradients=2),
    replace(TP, sequence_parallel=True, llama=True),
    replace(ZBV, per_token_loss=True, recompute="full"),
    replace(ZB_H1, llama=True, recompute="selective"),
]


def _assert_close(differences: list[Difference], bound: float, *, sharded: bool = False) -> None:
    for rank, difference in enumerate(differences):
        assert difference.losses < bound, rank
        if not sharded:
            assert difference.gradients < bound, (rank, difference.gradient_name)
        assert difference.weights < bound, (rank, difference.weight_name)
        assert difference.grad_norms < bound, rank


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_share_sequences_train_as_one_does(four_ranks: RankPool, case: Case) -> None:
    """Sums over a sequence are taken in two parts, which rounds otherwise: not the same bits."""
    differences = four_ranks.run(compare, case, replace(case.unpipelined, context_parallel=1))
    _assert_close(differences, 1e-6, sharded=case.distributed_optimizer)
