"""Experts on tensor-parallel ranks that share sequences, as megatron-core wants it, against the unpipelined model: the same bits.

Each expert is shared by the two ranks, or each rank has half of the experts; tokens are exchanged between them in F and B only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.gpt import compare
from tests.support.moe import ZB_H2, ZBV, MoeCase
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Layers",
    "experts on tensor-parallel ranks with `--sequence-parallel` (each expert shared, or half of the experts on each)",
    "works, bit for bit",
)

SIZES: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True, "layer_freq": (1, 1, 0, 1), "num_steps": 2}
FEATURES: list[dict[str, Any]] = [
    {"dispatcher": "alltoall", "z_loss_coeff": 0.01},
    {"dispatcher": "allgather", "shared": True, "recompute": "full"},
    {"dispatcher": "alltoall", "expert_parallel": 2, "expert_tensor_parallel": 1, "shared": True},
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features))
@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=lambda case: case.schedule)
@pytest.mark.sampled(0.16)
def test_same_bits_as_the_unpipelined_model(four_ranks: RankPool, base: MoeCase, features: dict[str, Any]) -> None:
    for rank, difference in enumerate(four_ranks.run(compare, replace(base, **SIZES, **features))):
        assert (difference.losses, difference.gradients, difference.weights) == (0.0, 0.0, 0.0), (rank, difference)
