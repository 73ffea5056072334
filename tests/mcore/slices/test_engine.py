"""Slices with Transformer Engine's own Python, whose attention has a causal mask that is aligned to the last query and key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.mcore.slices.test_slices import LOSS
from tests.support.ranks import RankPool
from tests.support.sliced import Sliced, SlicedBatches
from tests.support.tolerances import OTHER_ORDER
from tests.support.transformer_engine.gpt import EngineCase, EngineMlaCase, EngineMlaTrainer, EngineTrainer, compare_engine


@dataclass(frozen=True)
class SlicedEngineCase(Sliced, EngineCase):
    """A dense model of Transformer Engine's layers."""


@dataclass(frozen=True)
class SlicedEngineMlaCase(Sliced, EngineMlaCase):
    """The same with multi-latent attention."""


class _EngineTrainer(SlicedBatches, EngineTrainer, trains=SlicedEngineCase):
    pass


class _EngineMlaTrainer(SlicedBatches, EngineMlaTrainer, trains=SlicedEngineMlaCase):
    pass


ZBV = SlicedEngineCase("zbv", 2, 3, num_chunks=2, num_layers=4, num_slices=4)
CASES: list[Any] = [
    SlicedEngineCase("zb-h1", 2, 3, num_layers=4, num_slices=2, fuses=True),
    replace(ZBV, llama=True),
    replace(ZBV, tensor_parallel=2, sequence_parallel=True, num_slices=2),
    replace(ZBV, recompute="core_attn"),
    SlicedEngineMlaCase("zb-h1", 2, 3, num_layers=4, num_slices=2),
    SlicedEngineMlaCase("zb-h1", 2, 2, num_layers=4, num_slices=2, recompute="core_attn"),
]


@pytest.mark.claims(
    "Layers",
    "slices of microbatches with Transformer Engine's own Python: MHA, GQA, MLA, tensor and sequence parallelism, recomputed "
    "attention",
    "works, 4e-6; its kernels are **not run** (need CUDA)",
)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.2)
def test_slices_have_the_loss_and_gradients_of_whole_microbatches(engine_ranks: RankPool, case: Any) -> None:
    for rank, (found, _, left) in enumerate(engine_ranks.run(compare_engine, case)):
        assert left == []
        assert found.losses <= LOSS, (rank, found)
        assert found.gradients <= OTHER_ORDER, (rank, found)
