"""Tensor and sequence parallelism under zero bubble: who gathers what, and what runs while a sum travels, change no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.zerobubble.wgrad.sharing import WgradGather, WgradPolicy
from tests.support.gpt import Case, Difference, Trainer, compare
from tests.support.ranks import RankPool

ZBV = Case("zbv", 2, 4, num_chunks=2, tensor_parallel=2, num_steps=2)
ZB_H2 = Case("zb-h2", 2, 4, tensor_parallel=2, num_steps=2)
ONE_F_ONE_B = Case("1f1b", 2, 4, tensor_parallel=2, num_steps=2)


def sequence_parallel(base: Case, gather: WgradGather = WgradGather.KEEP, **features: Any) -> Case:
    return replace(base, sequence_parallel=True, wgrad=WgradPolicy(gather=gather), **features)


CASES = [
    *(sequence_parallel(base, gather) for base in (ZBV, ZB_H2) for gather in WgradGather),
    sequence_parallel(ONE_F_ONE_B, WgradGather.BOTH),
    sequence_parallel(ZBV, WgradGather.BOTH, llama=True, dtype=torch.bfloat16),
    sequence_parallel(ZB_H2, WgradGather.INPUT, llama=True, recompute="full"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequence_parallel_has_the_bits_of_the_unpipelined_model(four_ranks: RankPool, case: Case) -> None:
    _assert_same_bits(four_ranks.run(compare, case))


@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)
def test_sequence_parallel_is_tensor_parallel(four_ranks: RankPool, base: Case) -> None:
    """Against a model without it, whose norms see the whole sequence: a norm's or a bias' gradient is summed in two parts over
    the ranks, and everything after a reduce-scatter in another order: 1e-5 of float32 sums. A norm that was not marked would
    miss half of its gradient."""
    case = replace(base, adam_eps=1.0)
    for difference in four_ranks.run(compare, sequence_parallel(case), case.unpipelined):
        assert difference.losses < 1e-5
        assert difference.gradients < 1e-5, difference.gradient_name
        assert difference.weights < 1e-5, difference.weight_name


def _assert_same_bits(differences: list[Difference]) -> None:
    for rank, difference in enumerate(differences):
        assert (difference.losses, difference.gradients, difference.weights) == (0.0, 0.0, 0.0), (rank, difference)
