"""`HybridModel` under every schedule against the unpipelined one: same loss, same gradients, same weights after two steps.

fp32, and bit for bit, as in `test_equivalence`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.mcore.test_equivalence import _assert_equal
from tests.support.gpt import compare
from tests.support.hybrid import HAS_HYBRID_MODEL, WHY_NOT, HybridCase, case
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)

SCHEDULES = [
    *(("zb-h1", 1), ("zb-h2", 1), ("1f1b", 1), ("zb", 1)),
    *(("zbv", 2), ("v-half", 2), ("v-min", 2), ("zb-interleaved", 2)),
]


def _grid() -> list[HybridCase]:
    """Every schedule, on two ranks with stages of different numbers and kinds of layers, and on four with even ones."""
    cases = []
    for schedule, num_chunks in SCHEDULES:
        uneven = "*-*E-|E*" if num_chunks == 1 else "*-*|E-|*|-"
        cases.append(case(schedule, 2, 5, uneven, num_chunks=num_chunks))
        cases.append(case(schedule, 4, 6, "*-*E*-*-", num_chunks=num_chunks))
    return cases


@pytest.mark.claims(
    "Layers",
    "`HybridModel` (megatron-core 0.18.2 and 0.19.2), patterns of `*`, `-` and `E`: 1F1B, ZB-H1, ZB-H2, ZB, zero-bubble "
    "interleaved, ZBV, V-Half, V-Min; stages of different numbers and kinds of layers, or of none at the ends; expert, tensor"
    " and sequence parallelism, bf16, fp16, recomputation, per-token loss",
    "works, bit for bit; tied embeddings 1e-6",
)
@pytest.mark.parametrize("case", _grid(), ids=str)
@pytest.mark.sampled(0.2)
def test_same_bits_as_the_unpipelined_model(four_ranks: RankPool, case: HybridCase) -> None:
    _assert_equal(four_ranks.run(compare, case), case)


ZBV = case("zbv", 2, 4, "*-*|E-|*|-*", num_chunks=2)
ZB_H1 = case("zb-h1", 2, 4, "*-*E|*-")

FEATURES: list[dict[str, Any]] = [
    {"llama": True},
    {"expert_parallel": 2},
    {"tensor_parallel": 2, "sequence_parallel": True},
    {"per_token_loss": True},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(f"{k}={v}" for k, v in features.items()))
@pytest.mark.parametrize("base", [ZBV, ZB_H1], ids=str)
@pytest.mark.sampled(0.1)
def test_same_bits_with(four_ranks: RankPool, base: HybridCase, features: dict[str, Any]) -> None:
    case = replace(base, **features)
    _assert_equal(four_ranks.run(compare, case), case)


@pytest.mark.parametrize("base", [ZBV, ZB_H1], ids=str)
def test_stages_without_layers_at_the_ends(four_ranks: RankPool, base: HybridCase) -> None:
    pattern = "|*-|*-*E|" if base.num_chunks == 2 else "|*-*E"
    ends = case(base.schedule, 2, 4, pattern, num_chunks=base.num_chunks)
    _assert_equal(four_ranks.run(compare, ends), ends)


@pytest.mark.parametrize("base", [ZBV, ZB_H1], ids=str)
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["adam", "zero1"])
@pytest.mark.sampled(0.25)
def test_tied_embeddings(four_ranks: RankPool, base: HybridCase, distributed_optimizer: bool) -> None:
    """The embedding's gradient is the sum of two tensors here, and one running sum over microbatches in the reference: 1e-6."""
    case = replace(base, tied=True, adam_eps=1.0, distributed_optimizer=distributed_optimizer)
    for rank, difference in enumerate(four_ranks.run(compare, case)):
        assert difference.weights < 1e-6, (rank, difference)
        if not distributed_optimizer:
            assert difference.gradients < 1e-6, (rank, difference)
            assert difference.gradient_name in ("", "embedding.word_embeddings.weight"), "only the tied weight may differ"


@pytest.mark.claims(
    "Layers",
    "`HybridModel` with Mamba layers (`M`), whose kernels are replaced by plain torch: `in_proj` and `out_proj` are split, "
    "the rest stays in B",
    "works, bit for bit; the kernels are **not run** (need CUDA)",
)
@pytest.mark.parametrize(
    "case",
    [case("zbv", 2, 4, "M*|M-|M|-M", num_chunks=2), case("zb-h2", 2, 4, "M*M-|M")],
    ids=str,
)
def test_mamba_mixers_with_stand_ins_for_their_kernels(four_ranks: RankPool, case: HybridCase) -> None:
    """`tests.support.mamba` states what this does not cover: the kernels."""
    _assert_equal(four_ranks.run(compare, case), case)


def test_of_a_mamba_mixer_the_two_projections_are_split(four_ranks: RankPool) -> None:
    mamba = case("zb-h1", 2, 2, "M|M")
    for rank, (split, others) in enumerate(four_ranks.run(_split_of_mixer, mamba)):
        assert split == ["in_proj.weight", "out_proj.weight"], rank
        assert {name.split(".")[0].split("_")[0] for name in others} == {"conv1d", "dt", "A", "D", "norm"}, rank


def _split_of_mixer(rank: int, case: HybridCase) -> tuple[list[str], list[str]]:
    trainer = case.trainer()
    mixer = next(each for chunk in trainer.built.chunks for name, each in chunk.named_modules() if name.endswith("mixer"))
    names = {True: [], False: []}  # type: dict[bool, list[str]]
    for name, parameter in mixer.named_parameters():
        names[hasattr(parameter, "skip_backward_post_hook")].append(name)
    trainer.close()
    return sorted(names[True]), names[False]
