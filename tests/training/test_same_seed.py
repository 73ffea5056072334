"""Whole jobs with the same seed train the same model, whatever the schedule, the pipeline size and the tensor-parallel size.

Every layout is compared with one rank that runs no pipeline. Where only the pipeline differs, sums are formed in the same order
and the losses are the same bits. Tensor-parallel and data-parallel ranks form them in another, and so is the gradient norm where
gradients are clipped; there a tolerance is stated.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.training.launch import TINY_BATCH, TINY_MODEL, metrics, train

ITERATIONS = 50
RUN = [*TINY_MODEL, "--num-layers", "8", *TINY_BATCH, "--lr", "1e-3", "--train-iters", ITERATIONS, "--eval-iters", "0"]
RUN += ["--hidden-dropout", "0", "--attention-dropout", "0", "--split", "100,0,0", "--clip-grad", "0"]

LAYOUTS = {
    "1f1b-p2": (2, ["--pipeline-model-parallel-size", 2]),
    "interleaved-p2": (2, ["--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 2]),
    "zb-h1-p4": (4, ["--pipeline-model-parallel-size", 4, "--enable-zero-bubble"]),
    "zb-h2-p2": (2, ["--pipeline-model-parallel-size", 2, "--enable-zero-bubble", "--zero-bubble-max-pending-backward", "2p"]),
    "zbv-p1": (1, ["--zero-bubble-v-schedule"]),
    "zbv-p4": (4, ["--pipeline-model-parallel-size", 4, "--zero-bubble-v-schedule"]),
    "v-half-p2": (
        2,
        ["--pipeline-model-parallel-size", 2, "--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup", "half"],
    ),
    "zbv-p2-clip": (2, ["--pipeline-model-parallel-size", 2, "--zero-bubble-v-schedule", "--clip-grad", "1"]),
    "1f1b-p2-tp2": (4, ["--pipeline-model-parallel-size", 2, "--tensor-model-parallel-size", 2]),
    "zbv-p2-tp2": (4, ["--pipeline-model-parallel-size", 2, "--tensor-model-parallel-size", 2, "--zero-bubble-v-schedule"]),
    "zb-h1-p2-dp2": (4, ["--pipeline-model-parallel-size", 2, "--enable-zero-bubble", "--use-distributed-optimizer"]),
    "tp2-dp2": (4, ["--tensor-model-parallel-size", 2]),
}


def _losses(folder: Path, corpus: str, num_ranks: int, flags: list[object]) -> list[float]:
    file = folder / "metrics.jsonl"
    train([*RUN, *flags, "--data-path", corpus, "--metrics-jsonl", file], num_ranks=num_ranks)
    return [fields["loss"] for _, fields in sorted(metrics(file).items())]


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank without a pipeline."""
    losses = _losses(tmp_path_factory.mktemp("alone"), corpus, 1, [])
    assert len(losses) == ITERATIONS
    assert losses[-1] < losses[0] - 0.5, "it learns, so that the weights matter"
    return losses


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(0.2)
def test_every_layout_has_the_same_losses(name: str, alone: list[float], corpus: str, tmp_path: Path) -> None:
    num_ranks, flags = LAYOUTS[name]
    losses = _losses(tmp_path, corpus, num_ranks, flags)
    if any(word in name for word in ("tp", "dp", "clip")):
        assert losses == pytest.approx(alone, rel=1e-6)
    else:
        assert losses == alone


def test_by_rank_another_pipeline_is_another_model(alone: list[float], corpus: str, tmp_path: Path) -> None:
    """Megatron-LM's way, on request."""
    flags = [*LAYOUTS["zbv-p1"][1], "--init-by-rank", "--train-iters", 1, "--lr-decay-iters", ITERATIONS]
    (loss,) = _losses(tmp_path, corpus, 1, flags)
    assert math.isclose(loss, alone[0], rel_tol=0.1)
    assert loss != alone[0]
