"""MTP layers (multi-token prediction) under our schedules against the unpipelined model.

The embedding of the MTP layers is a second copy of the first one, and the output layer is used once more for every layer: the
gradients of these are sums in another order than the reference's, so the tolerance is 1e-6. Adam's epsilon is large, as for
tied embeddings. All other gradients are the same bits. In float16 the reference rounds its sums to 11 bits, and weights may
differ by twice their last one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.gpt import compare
from tests.support.mtp import ZB_H2, ZBV, MtpCase
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Layers",
    "multi-token prediction (`--mtp-num-layers`), linear and V: tied and untied embeddings, overlapped reduction, distributed"
    " optimizer, per-token loss, tensor and sequence parallelism, uneven stages, fp16 with recomputation",
    "works, 1e-6 (embedding and head are sums in another order; fp16 1e-3)",
)

SUMS = {"embedding.word_embeddings.weight", "output_layer.weight"}
FEATURES: list[dict[str, Any]] = [
    {},
    {"tied": True},
    {"tied": True, "overlap_grad_reduce": True, "distributed_optimizer": True, "different_data": True},
    {"per_token_loss": True, "num_mtp_layers": 1, "llama": True},
    {"dtype": torch.float16, "recompute": "full", "tied": True},
    {"tensor_parallel": 2, "sequence_parallel": True, "tied": True},
]


CASES = [
    *(replace(base, **features) for features in FEATURES for base in (ZBV, ZB_H2)),
    replace(ZBV, layout="E|tt|tt|L", llama=True),  # nothing but MTP layers and the loss on the last stage
    replace(ZB_H2, layout="Et|tttL", llama=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.1)
def test_same_as_the_unpipelined_model(four_ranks: RankPool, case: MtpCase) -> None:
    _assert_equal(four_ranks, case)


@pytest.mark.slow
def test_stock_1f1b_does_not_wait_for_the_unused_output_weight(four_ranks: RankPool) -> None:
    _assert_equal(four_ranks, replace(ZB_H2, schedule="stock", tied=True, overlap_grad_reduce=True, num_steps=2))


def _assert_equal(ranks: RankPool, case: MtpCase) -> None:
    tolerance, of_weights = (1e-6, 1e-6) if case.dtype is torch.float32 else (1e-3, 2e-3)
    differences = ranks.run(compare, case)
    for rank, difference in enumerate(differences):
        assert difference.losses < max(1e-5, tolerance), (rank, difference)
        assert difference.weights < of_weights, (rank, difference)
        if not case.distributed_optimizer:  # a rank has only its share of the sums then
            assert difference.gradients < tolerance, (rank, difference)
            assert case.dtype is not torch.float32 or SUMS.issuperset(difference.unequal), (rank, difference)
    has_mtp = [any(name.startswith("mtp.layers.") for name in difference.names) for difference in differences]
    last = case.spec.placement.stage_to_rank[-1]
    assert has_mtp == [rank // (4 // case.num_ranks) == last for rank in range(4)], "they are on the stage of the loss"
