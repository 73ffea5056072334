"""Whole jobs with context parallelism learn the same as without; the attention that a flag chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend

from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.models.layer_specs import local_layer
from megatron.zerobubble.training.models.mcore_config import transformer_config
from tests.training.test_arguments import settings
from tests.training.test_runs import LAYER, NO_DROPOUT, Job, close

pytestmark = [
    pytest.mark.claims(
        "Parallelism",
        "whole jobs with context parallelism: stock 1F1B and a searched schedule with a new plan and optimistic steps on shared "
        "sequences, a checkpoint that whole ones continue, loss masks of unequal numbers of tokens",
        "works, losses and norms within 4e-6, after steps of Adam in proportion to them",
    ),
    pytest.mark.claims(
        "Layers",
        "`--attention-backend flash`, `unfused`, `local`, `auto`",
        "works: the layers have the attention that was chosen",
    ),
]


FLAGS = [*NO_DROPOUT, *LAYER, "--disable-bias-linear", "--clip-grad", "0.5", "--use-distributed-optimizer"]
SHARED = ["--context-parallel-size", "2"]
OPTIMISTIC = ["--zero-bubble-schedule", "zb", "--enable-optimizer-post-validation", "--post-validation-patience", "0"]
MEASURING = ["--zero-bubble-pipeline-timers-start-iter", "2", "--zero-bubble-pipeline-timers-end-iter", "3"]
MEASURING += ["--zero-bubble-planning-seconds", "0.1"]
NAMES = ("loss", "grad_norm", "validation_loss")


@pytest.mark.sampled(0.07, group="whole jobs")
def test_shared_sequences_train_as_whole_ones(corpus: str, tmp_path: Path) -> None:
    """megatron-core's 1F1B on shared sequences; there, too, a searched schedule with optimistic steps that are rolled back and a
    new plan; and its checkpoint, continued on whole sequences. Not the same bits: sums over a sequence are taken in two parts,
    and megatron-core's loop sums squares for the gradient norm in another order.

    Loss masks, which leave out ends of documents, are of unequal numbers of tokens on the two ranks.
    """
    flags = [*FLAGS, "--data-path", corpus]
    whole = Job(tmp_path / "whole", [*flags, "--enable-zero-bubble"])
    stock = Job(tmp_path / "stock", [*flags, *SHARED], num_ranks=4)
    assert "4 ranks = 2 pipeline x 1 tensor x 2 context x 1 data, 4 microbatches of 2 x 32 tokens" in stock.said
    saves = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "3"]
    shared = Job(tmp_path / "shared", [*flags, *SHARED, *OPTIMISTIC, *MEASURING, *saves], num_ranks=4)
    assert shared.said.count("re-planned with profiled timings") == 1
    assert shared.said.count("clipped by post-validation") > 0
    assert _curves(shared) == close(_curves(whole))
    assert _curves(stock) == close(_curves(whole))
    loads = ["--load", str(tmp_path / "checkpoints"), "--ckpt-step", "3", "--enable-zero-bubble"]
    continued = Job(tmp_path / "continued", [*flags, *loads])
    assert sorted(continued.metrics) == [4, 5, 6]
    assert _curves(continued) == close({name: value for name, value in _curves(whole).items() if int(name[-1]) > 3})


def _curves(job: Job) -> dict[str, float]:
    return {f"{name} {number}": fields[name] for number, fields in job.metrics.items() for name in NAMES if name in fields}


@pytest.mark.parametrize("name", ["auto", "flash", "fused", "unfused", "local"])
def test_the_flag_reaches_the_layers(name: str) -> None:
    with quiet_third_parties():
        config = transformer_config(settings(f"--attention-backend {name}"), on_gpu=False, layout=None)
    assert config.attention_backend is AttnBackend[name]
    module = DotProductAttention if name == "local" else TorchDotProductAttention
    assert local_layer(config, has_experts=False).submodules.self_attention.submodules.core_attention is module


def test_torchs_attention_is_the_default() -> None:
    assert settings().model.attention_backend == "auto"
