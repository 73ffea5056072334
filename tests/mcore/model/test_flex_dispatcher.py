"""megatron-core's flex dispatcher with DeepEP under a split of B and W.

Its autograd functions are megatron-core's own, on a double of DeepEP's buffer. Not run on a GPU, nor with DeepEP itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.deep_ep import Buffer, deep_ep
from tests.support.gpt import Difference, compare
from tests.support.moe import ZB_H2, ZBV, MoeCase
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Layers",
    "the flex dispatcher with DeepEP (`moe_token_dispatcher_type` flex), whose buffer is a double: ZBV and ZB-H2 with "
    "expert parallelism 2, with recomputation",
    "works, 1e-6 of the all-to-all dispatcher; **DeepEP, HybridEP and NCCL EP never run** ([what their sources "
    "say](adr/0013-mixture-of-experts.md))",
)


def _compare(rank: int, case: MoeCase, reference: MoeCase) -> tuple[Difference, int]:
    with deep_ep():
        return compare(rank, case, reference), Buffer.num_calls


@pytest.mark.parametrize("features", [{}, {"recompute": "full"}], ids=["", "recompute"])
@pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=lambda case: case.schedule)
@pytest.mark.sampled(0.5)
def test_it_trains_as_the_all_to_all_dispatcher(four_ranks: RankPool, base: MoeCase, features: dict[str, Any]) -> None:
    """Without a pipeline there are four replicas instead of two, and experts get their tokens in another order: 1e-6."""
    case = replace(base, expert_parallel=2, dispatcher="flex", different_data=True, adam_eps=1.0, shared=True, **features)
    reference = replace(case.unpipelined, dispatcher="alltoall")
    for rank, (difference, num_calls) in enumerate(four_ranks.run(_compare, case, reference)):
        assert num_calls > 0
        assert difference.losses < 1e-5, (rank, difference)
        assert difference.gradients < 1e-6, (rank, difference)
        assert difference.weights < 1e-6, (rank, difference)
