"""Whole jobs with context and sequence parallelism, and with and without torch's attention, learn the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend

from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.models.layer_specs import local_layer
from megatron.zerobubble.training.models.mcore_config import transformer_config
from tests.training.launch import TINY_BATCH, TINY_MODEL, metrics, train
from tests.training.test_arguments import settings
from tests.training.test_runs import LAYER, NO_DROPOUT, Job

pytestmark = [
    pytest.mark.claims(
        "Parallelism",
        "whole jobs with context parallelism: stock 1F1B and a searched schedule with a new plan and optimistic steps on shared "
        "sequences, a checkpoint that whole ones continue, loss masks of unequal numbers of tokens",
        "works, losses and norms within 1e-6",
    ),
    pytest.mark.claims(
        "Parallelism",
        "sequence parallelism through whole jobs, from one checkpoint: ZBV on 2 ranks against 2 tensor-parallel ranks without a "
        "pipeline; stock 1F1B, ZB-H2, ZBV, V-Half with full recomputation on 4 ranks (`make test-slow`)",
        "works, losses and norms within 2e-5",
    ),
    pytest.mark.claims(
        "Layers",
        "`--attention-backend flash`, `unfused`, `local`, `auto`; whole jobs with `auto` and `local`, masked by document",
        "works, 1e-5 after six steps",
    ),
]


FLAGS = [*NO_DROPOUT, *LAYER, "--disable-bias-linear", "--eod-mask-loss", "--clip-grad", "0.5", "--use-distributed-optimizer"]
SHARED = ["--context-parallel-size", "2"]
OPTIMISTIC = ["--zero-bubble-schedule", "zb", "--enable-optimizer-post-validation", "--post-validation-patience", "0"]
MEASURING = ["--zero-bubble-pipeline-timers-start-iter", "2", "--zero-bubble-pipeline-timers-end-iter", "3"]
MEASURING += ["--zero-bubble-planning-seconds", "0.1"]
NAMES = ("loss", "grad_norm", "validation_loss")


@pytest.mark.sampled(0.15, group="whole jobs")
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
    assert _curves(shared) == _close(_curves(whole))
    assert _curves(stock) == _close(_curves(whole))
    loads = ["--load", str(tmp_path / "checkpoints"), "--ckpt-step", "3", "--enable-zero-bubble"]
    continued = Job(tmp_path / "continued", [*flags, *loads])
    assert sorted(continued.metrics) == [4, 5, 6]
    assert _curves(continued) == _close({name: value for name, value in _curves(whole).items() if int(name[-1]) > 3})


def _close(curves: dict[str, float]) -> dict[str, Any]:
    """Losses and the first gradient norm within 1e-6. Later norms are of weights that Adam has stepped: where a moment is near
    zero it turns the rounding of a gradient into a step of its own size."""
    return {
        name: pytest.approx(value, rel=1e-5 if name.startswith("grad_norm") and name != "grad_norm 1" else 1e-6)
        for name, value in curves.items()
    }


def _curves(job: Job) -> dict[str, float]:
    return {f"{name} {number}": fields[name] for number, fields in job.metrics.items() for name in NAMES if name in fields}


JOB = [*TINY_MODEL, *TINY_BATCH, "--train-iters", "6", "--eval-iters", "0", "--hidden-dropout", "0", "--attention-dropout", "0"]
SEQUENCE_PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
ON_FOUR = [
    "",
    "--zero-bubble-v-schedule",
    "--zero-bubble-max-pending-backward 2p",
    "--zero-bubble-v-schedule --enable-optimizer-post-validation",
    "--zero-bubble-schedule v-half --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
]
RELATIVE = 2e-5
"""Tolerance of losses after four float32 steps with another order of summation."""


@pytest.fixture(scope="module")
def unpipelined(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the job on two ranks, with a checkpoint at iteration 2."""
    folder = tmp_path_factory.mktemp("unpipelined")
    saves = ["--save", str(folder), "--save-interval", "2"]
    files = ["--data-path", corpus, "--metrics-jsonl", folder / "metrics.jsonl", *saves]
    said = train([*JOB, *SEQUENCE_PARALLEL, *files], num_ranks=2)
    assert "training with no pipeline: 2 ranks = 1 pipeline x 2 tensor x 1 data" in said
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [(2, "--zero-bubble-v-schedule"), *(pytest.param(4, flags, marks=pytest.mark.slow) for flags in ON_FOUR)],
)
@pytest.mark.sampled(0.15, group="whole jobs")
def test_a_pipeline_has_the_losses_of_the_model_without_one(
    num_ranks: int, flags: str, unpipelined: Path, corpus: str, tmp_path: Path
) -> None:
    job = [*JOB, *(SEQUENCE_PARALLEL if num_ranks == 4 else ()), "--pipeline-model-parallel-size", "2", *flags.split()]
    job += ["--load", str(unpipelined), "--ckpt-step", "2", "--data-path", corpus]
    train([*job, "--metrics-jsonl", tmp_path / "metrics.jsonl"], num_ranks=num_ranks)
    expected, actual = metrics(unpipelined / "metrics.jsonl"), metrics(tmp_path / "metrics.jsonl")
    assert sorted(actual) == [3, 4, 5, 6]
    for iteration, fields in actual.items():
        for name in ("loss", "grad_norm"):
            assert fields[name] == pytest.approx(expected[iteration][name], rel=RELATIVE), (iteration, name)
    assert expected[6]["loss"] < expected[1]["loss"] - 0.1, "it learns, so that wrong weights would be seen"


@pytest.mark.parametrize("name", ["auto", "flash", "fused", "unfused", "local"])
def test_the_flag_reaches_the_layers(name: str) -> None:
    with quiet_third_parties():
        config = transformer_config(settings(f"--attention-backend {name}"), on_gpu=False, layout=None)
    assert config.attention_backend is AttnBackend[name]
    module = DotProductAttention if name == "local" else TorchDotProductAttention
    assert local_layer(config, has_experts=False).submodules.self_attention.submodules.core_attention is module


def test_torchs_attention_is_the_default() -> None:
    assert settings().model.attention_backend == "auto"


@pytest.mark.sampled(0.15, group="whole jobs")
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
