"""Slices with Transformer Engine's own Python, whose attention has a causal mask that is aligned to the last query and key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch import Tensor

from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice
from megatron.zerobubble.mcore.slices.prefix_attention import attend_to_prefix
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
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


class Cudnn(torch.nn.Module):
    """An attention of Transformer Engine, as far as slices look at it."""

    __module__ = "transformer_engine.pytorch.attention"

    def __init__(self, dropout: float, **config: Any) -> None:
        super().__init__()
        given = {"params_dtype": torch.bfloat16, "attention_backend": AttnBackend.auto}
        self.config, self.attention_dropout = SimpleNamespace(**(given | config)), dropout
        self.mask_types: list[AttnMaskType] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, attn_mask_type: AttnMaskType) -> Tensor:
        self.mask_types.append(attn_mask_type)
        return query.flatten(2)


def warnings_of(caplog: pytest.LogCaptureFixture, lengths: tuple[int, ...], *, dropout: float = 0.0, **config: Any) -> list[str]:
    """What is logged while two layers run the slices of two microbatches."""
    caplog.clear()
    slices, layers = CurrentSlice(), [Cudnn(dropout, **config) for _ in range(2)]
    for layer in layers:
        attend_to_prefix(layer, slices)
    for microbatch in range(2):
        for part in SliceOptions(lengths=lengths).parts(sum(lengths), len(lengths)):
            own = torch.zeros(part.length, 1, 1, 4, dtype=torch.bfloat16)
            with slices.running(0, microbatch, part):
                for layer in layers:
                    layer(own, own, own, None, attn_mask_type=AttnMaskType.causal)
    assert all(each is AttnMaskType.causal_bottom_right for layer in layers for each in layer.mask_types)
    return [record.getMessage() for record in caplog.records]


def test_a_fall_back_to_unfused_attention_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = warnings_of(caplog, (128, 96))
    assert "falls back to its unfused kernel, which keeps all scores: a slice has tokens 128 to 223" in line
    (line,) = warnings_of(caplog, (64, 64), dropout=0.1)
    assert "attention_dropout is 0.1, and without flash-attn cuDNN takes slices only without dropout" in line
    assert warnings_of(caplog, (128, 64)) == []
    assert warnings_of(caplog, (128, 96), params_dtype=torch.float32) == [], "unfused without slices, too"
    assert warnings_of(caplog, (128, 96), attention_backend=AttnBackend.unfused) == []
    monkeypatch.setattr(metadata, "version", lambda name: "2.8.3")
    assert warnings_of(caplog, (128, 96)) == []
    assert len(warnings_of(caplog, (128, 96), attention_backend=AttnBackend.fused)) == 1, "which turns flash-attn off"
