"""Slices with Transformer Engine's own Python, whose attention has a causal mask that is aligned to the last query and key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.gpt import Tensors, Trainer
from tests.support.ranks import RankPool
from tests.support.sliced import Sliced, SlicedBatches
from tests.support.tolerances import OTHER_ORDER, after_steps
from tests.support.transformer_engine.gpt import EngineCase, EngineMlaCase, EngineMlaTrainer, EngineTrainer, compare_engine

LOSS = 4 * after_steps(1, lr=1e-2)
"""Of a loss of about 4; the last one is after a step."""


@dataclass(frozen=True)
class SlicedEngineCase(Sliced, EngineCase):
    """A dense model of Transformer Engine's layers."""

    def trainer(self, initial: Tensors | None = None) -> Trainer:
        return _EngineTrainer(self, initial)


@dataclass(frozen=True)
class SlicedEngineMlaCase(Sliced, EngineMlaCase):
    """The same with multi-latent attention."""

    def trainer(self, initial: Tensors | None = None) -> Trainer:
        return _EngineMlaTrainer(self, initial)


class _EngineTrainer(SlicedBatches, EngineTrainer):
    pass


class _EngineMlaTrainer(SlicedBatches, EngineMlaTrainer):
    pass


ZBV = SlicedEngineCase("zbv", 2, 3, num_chunks=2, num_layers=4, num_slices=4)
CASES: list[Any] = [
    SlicedEngineCase("zb-h1", 2, 3, num_layers=4, num_slices=2, fuses=True),
    replace(ZBV, llama=True),
    replace(ZBV, tensor_parallel=2, sequence_parallel=True, num_slices=2),
    replace(ZBV, recompute="core_attn"),
    SlicedEngineMlaCase("zb-h1", 2, 3, num_layers=4, num_slices=2),
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
