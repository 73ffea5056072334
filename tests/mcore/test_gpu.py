"""Whole training steps on a GPU: the schedules against the unpipelined model in every format, and the allocator's behavior.

Over NCCL, with a card for each rank, or on one card that all of them share. The bits are not those of the unpipelined model: the
wgrad GEMM accumulates into its accumulator, and the embedding's gradient is summed by atomic additions.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from tests.support.comparisons import Difference, compare
from tests.support.gpt import Case
from tests.support.memory_ledger import train_watched
from tests.support.ranks import RankPool
from tests.support.sliced import SlicedCase
from tests.support.transformer_engine.graphed import GraphedCase, GraphedMoeCase

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative to a tensor's largest entry. The reference rounds each weight gradient to the format before adding it, W does not."""
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# Adam with its usual epsilon would blow a last-bit difference of a tiny gradient up to a whole step.
ZBV = Case("zbv", 2, 4, num_chunks=2, adam_eps=1.0)
ZB_H2 = Case("zb-h2", 2, 4, adam_eps=1.0)
BASES = pytest.mark.parametrize("base", [ZBV, ZB_H2], ids=str)


def _assert_close(differences: list[Difference], case: Case) -> None:
    tolerance = TOLERANCE[case.dtype]
    for rank, difference in enumerate(differences):
        assert difference.losses < tolerance, (rank, difference)
        assert difference.gradients < tolerance, (rank, difference)
        assert difference.weights < tolerance, (rank, difference)
    reporting = [difference.num_losses for difference in differences if difference.num_losses]
    assert set(reporting) == {case.num_microbatches}


@pytest.mark.gpu
def test_a_llama(nccl_ranks: RankPool) -> None:
    case = replace(ZBV, llama=True, dtype=torch.bfloat16)
    _assert_close(nccl_ranks.run(compare, case), case)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("llama", [False, True])
def test_slices(nccl_ranks: RankPool, dtype: torch.dtype, llama: bool) -> None:
    """Attention to the slices before by the kernels of a GPU, under a mask that ends with the last query and key."""
    case = SlicedCase("zbv", 2, 4, num_chunks=2, num_slices=4, llama=llama, dtype=dtype, adam_eps=1.0)
    _assert_close(nccl_ranks.run(compare, case), case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        GraphedCase("zbv", 2, 4, num_chunks=2, adam_eps=1.0, fuses=True),
        GraphedCase("zb-h2", 2, 4, adam_eps=1.0, fuses=True, llama=True, scopes=()),
        GraphedMoeCase("zb-h1", 2, 4, num_layers=4, adam_eps=1.0, fuses=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("nccl_ranks", [2], indirect=True)
def test_graphs_of_layers(nccl_ranks: RankPool, case: GraphedCase | GraphedMoeCase) -> None:
    """Captured by Transformer Engine in the plan's order, and replayed with B and W split."""
    pytest.importorskip("transformer_engine")
    _assert_close(nccl_ranks.run(compare, case), case)


@pytest.mark.claims(
    "Schedules",
    "training steps of ZBV and ZB-H2 on NCCL, 2 and 4 ranks, in fp32, fp16 and bf16",
    "the unpipelined model's within a dtype's rounding, by ranks that shared an H200 ([what was run](benchmarks/gpu.md))",
)
@pytest.mark.gpu
@BASES
@DTYPES
@pytest.mark.parametrize("nccl_ranks", [2, 4], indirect=True)
def test_equivalence_on_nccl(nccl_ranks: RankPool, base: Case, dtype: torch.dtype) -> None:
    case = replace(base, dtype=dtype, num_ranks=nccl_ranks.size, num_microbatches=2 * nccl_ranks.size)
    _assert_close(nccl_ranks.run(compare, case), case)


# -- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.timeout(600)
@BASES
def test_memory_over_200_iterations(nccl_ranks: RankPool, base: Case) -> None:
    """No memory leaks from iteration to iteration, the allocator's pool does not fragment (what it has reserved after 20
    iterations is enough for all later ones), and the plan predicts the peak to 5 %."""
    case = replace(base, num_ranks=4, num_microbatches=8, dtype=torch.bfloat16)
    ledgers = nccl_ranks.run(train_watched, case, 200, 20)
    for rank, ledger in enumerate(ledgers):
        sys.stdout.write(f"{case}, rank {rank}: activations {ledger.measured}, predicted {ledger.predicted}; {ledger.held[-1]}\n")
        assert ledger.complaints() == [], (rank, ledger.predicted, ledger.held[20:])
        assert all(each.reserved is not None for each in ledger.held)
