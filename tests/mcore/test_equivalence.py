"""Every schedule against the unpipelined model: same loss, same gradients, same weights after two optimizer steps.

fp32, and bit for bit (`torch.equal`): each weight's gradient is accumulated over the microbatches in the same ascending order on
both sides, by the same operations. Where a sum is taken in another order the tolerance is 1e-6 and the test states which sum.
Weights are compared without clipping, because the gradient norm is a sum over all parameters and its order depends on where they
are; clipping has its own test.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.gpt import Case, assert_near, assert_same_bits, compare
from tests.support.ranks import RankPool

SCHEDULES = [("stock", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zbv", 2)]


def _grid() -> list[Case]:
    cases = []
    for num_ranks in (2, 4):
        for num_microbatches in sorted({1, 2, num_ranks, 3 * num_ranks}):
            for schedule, num_chunks in SCHEDULES:
                cases.append(Case(schedule, num_ranks, num_microbatches, num_chunks=num_chunks))
        cases.append(Case("stock", num_ranks, 2 * num_ranks, num_chunks=2))
        cases.append(Case("interleaved-1f1b", num_ranks, num_ranks + 1, num_chunks=2))
        for schedule in ("v-half", "v-min", "1f1b-v", "zb-interleaved"):
            cases.append(Case(schedule, num_ranks, num_ranks + 1, num_chunks=2))
        cases.append(Case("zb", num_ranks, 6, max_pending_backward=num_ranks + 1))
    return sorted(cases, key=lambda case: case.num_microbatches)  # neighbors share their reference


@pytest.mark.claims(
    "Schedules",
    "stock 1F1B; 1F1B, interleaved 1F1B, ZB-H1, ZB-H2, ZB, ZBV through our executor, p 2 and 4, m from 1 to 3p; V-Half, "
    "V-Min, 1F1B-V, zero-bubble interleaved, m = p+1; ZB-W with uneven stages",
    "works, bit for bit",
)
@pytest.mark.claims(
    "Schedules",
    "megatron-core's own 1F1B and interleaved 1F1B, the baselines (on gloo the interleaved one keeps its outputs: freed early"
    " they were seen to be sent wrong)",
    "works",
)
@pytest.mark.claims(
    "Layers",
    "torch's attention under schedules, as the attention of nearly all tests: recomputation, dropout, every placement",
    "works, bit for bit",
    also=("mcore/model/test_recompute.py",),
)
@pytest.mark.parametrize("case", _grid(), ids=str)
@pytest.mark.sampled(0.15)
def test_same_bits_as_the_unpipelined_model(four_ranks: RankPool, case: Case) -> None:
    assert_same_bits(four_ranks.run(compare, case), case)


UNEVEN = [
    Case("stock", 2, 4, num_layers=7, layout="Et|t*6L"),
    Case("stock", 2, 4, num_layers=7, num_chunks=2, layout="Ettt|tt|t|tL"),
    Case("zb-h2", 4, 6, num_layers=7, layout="E|ttt|t*4|L"),
    Case("zb-interleaved", 2, 3, num_layers=7, num_chunks=2, layout="Ettt|t|tt|tL"),
    Case("zbv", 2, 4, num_layers=7, num_chunks=2, layout="Et|ttt|ttt|L"),
    Case("zbv", 2, 4, num_layers=7, num_chunks=2, layout="Ettt||t*4|L"),
    Case("zb-interleaved", 2, 4, num_layers=7, num_chunks=2, layout="Ettt|||t*4L"),
    Case("zb-interleaved", 2, 4, num_layers=7, num_chunks=3, layout="Et||tt|t|tt|tL"),
    Case("zb-w", 2, 4, num_layers=7, num_chunks=4, layout="Et|t|tt||t|t|t|L"),
    Case("zbv", 4, 8, num_layers=12, num_chunks=2),
]


@pytest.mark.claims(
    "Schedules",
    "uneven stages (linear, stock interleaved, V, two Vs), any stage without a layer, an odd number of layers per rank under V",
    "works, bit for bit",
)
@pytest.mark.parametrize("case", UNEVEN, ids=str)
@pytest.mark.sampled(0.2)
def test_same_bits_with_uneven_stages(four_ranks: RankPool, case: Case) -> None:
    """Stages of any number of layers, ends without a layer, odd layers per rank under V: each layer keeps its global index."""
    assert_same_bits(four_ranks.run(compare, case), case)


ZBV = Case("zbv", 2, 4, num_chunks=2)
ZB_H2 = Case("zb-h2", 2, 4)

FEATURES = [
    {"tensor_parallel": 2},
    {"llama": True},
    {"llama": True, "tensor_parallel": 2},
    {"per_token_loss": True},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "block"},
    {"recompute": "core_attn mlp", "llama": True},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
]


@pytest.mark.claims("Layers", "GQA, SwiGLU, RMSNorm; rotary and learned positions; per-token loss", "works, bit for bit")
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(f"{k}={v}" for k, v in features.items()))
@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
@pytest.mark.sampled(0.12)
def test_same_bits_with(four_ranks: RankPool, base: Case, features: dict[str, object]) -> None:
    case = replace(base, **features)  # type: ignore[arg-type]
    assert_same_bits(four_ranks.run(compare, case), case)


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["ddp", "zero1"])
@pytest.mark.sampled(0.13)
def test_data_parallel_2(four_ranks: RankPool, base: Case, overlap: bool, distributed_optimizer: bool) -> None:
    """Two data-parallel replicas with different data. The reference runs on four data-parallel ranks, so that the mean over the
    replicas is summed in another order: 1e-6. With the distributed optimizer a rank's gradient buffer holds garbage outside of
    its own shard, so the weights are what is compared. Adam gets a large epsilon (megatron-core's distributed optimizer takes no
    SGD): with the usual one it would blow a last-bit difference of a tiny gradient up to a whole step."""
    case = replace(
        base, different_data=True, overlap_grad_reduce=overlap, distributed_optimizer=distributed_optimizer, adam_eps=1.0
    )
    assert_near(four_ranks.run(compare, case), case, 1e-6)


@pytest.mark.claims("Layers", "tied embeddings", "works, 1e-6")
@pytest.mark.parametrize("base", [ZBV, ZB_H2, replace(ZBV, layout="E|t*4|t*4|L")], ids=str)
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["adam", "zero1"])
@pytest.mark.sampled(0.17)
def test_tied_embeddings(four_ranks: RankPool, base: Case, distributed_optimizer: bool) -> None:
    """The embedding's gradient is the sum of two tensors here, and one running sum over microbatches in the reference: 1e-6."""
    case = replace(base, tied=True, adam_eps=1.0, distributed_optimizer=distributed_optimizer)
    differences = four_ranks.run(compare, case)
    assert_near(differences, case, 1e-6)
    if not distributed_optimizer:
        assert {name for found in differences for name in found.unequal} <= {"embedding.word_embeddings.weight"}


@pytest.mark.claims("Precision and the optimizer", "gradient clipping", "works, 1e-6")
@pytest.mark.parametrize("base", [ZBV, ZB_H2, pytest.param(Case("zbv", 4, 8, num_chunks=2), marks=pytest.mark.smoke)], ids=str)
@pytest.mark.sampled(0.34)
def test_clipping(four_ranks: RankPool, base: Case) -> None:
    """The norm is summed over the ranks' parameters in another order than over the whole model's: 1e-6."""
    case = replace(base, clip_grad=0.1, optimizer="sgd")
    for rank, difference in enumerate(four_ranks.run(compare, case)):
        assert difference.gradients == 0.0, (rank, difference)
        assert difference.grad_norms < 1e-6, (rank, difference)
        assert difference.weights < 1e-6, (rank, difference)
