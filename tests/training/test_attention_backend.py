"""--attention-backend, from the flag to the modules, and whole jobs with each kind of attention that a CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend

from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.models.layer_specs import local_layer
from megatron.zerobubble.training.models.mcore_config import transformer_config
from tests.training.launch import TINY_BATCH, TINY_MODEL, metrics, train
from tests.training.test_arguments import settings

pytestmark = pytest.mark.claims(
    "Layers",
    "`--attention-backend flash`, `unfused`, `local`, `auto`; whole jobs with `auto` and `local`, masked by document",
    "works, 1e-5 after six steps",
)


@pytest.mark.parametrize("name", ["auto", "flash", "fused", "unfused", "local"])
def test_the_flag_reaches_the_layers(name: str) -> None:
    with quiet_third_parties():
        config = transformer_config(settings(f"--attention-backend {name}"), on_gpu=False, layout=None)
    assert config.attention_backend is AttnBackend[name]
    module = DotProductAttention if name == "local" else TorchDotProductAttention
    assert local_layer(config, has_experts=False).submodules.self_attention.submodules.core_attention is module


def test_torchs_attention_is_the_default() -> None:
    assert settings().model.attention_backend == "auto"


@pytest.mark.sampled(0.4, group="whole jobs")
def test_jobs_with_and_without_torchs_attention_learn_the_same(corpus: str, tmp_path: Path) -> None:
    """1e-5 after six steps: the sums of the softmax are made in another order. One job masks documents, as the data says."""
    zbv = ["--pipeline-model-parallel-size", "2", "--zero-bubble-v-schedule", "--reset-attention-mask"]
    model = [*TINY_MODEL, "--group-query-attention", "--num-query-groups", "2", "--position-embedding-type", "rope"]
    fixed = ["--attention-dropout", "0", "--hidden-dropout", "0", "--train-iters", "6", "--data-path", corpus]
    losses = {}
    for name in ("auto", "local"):
        log = tmp_path / name
        train([*model, *TINY_BATCH, *zbv, *fixed, "--attention-backend", name, "--metrics-jsonl", log])
        losses[name] = [each["loss"] for _, each in sorted(metrics(log).items())]
    assert len(losses["auto"]) == 6
    assert losses["auto"] == pytest.approx(losses["local"], rel=1e-5)
    assert losses["auto"][-1] < losses["auto"][0]
