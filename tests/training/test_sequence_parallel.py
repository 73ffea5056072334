"""`--sequence-parallel` in whole jobs, as a user starts them: a checkpoint continues with any schedule to the same losses.

One job on two ranks, tensor-parallel 2 without a pipeline (it has no bubble: zero bubble is refused there), trains and saves.
Other jobs go on from it: ZBV on two ranks without tensor parallelism, and on four ranks, tensor 2 x pipeline 2, megatron-core's
own 1F1B and several of ours. They start from the same weights, moments and samples, and without dropout only the order of sums
differs (of a gradient's norm over stages, and of products over shards of the sequence).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.launch import TINY_BATCH, TINY_MODEL, metrics, train

pytestmark = pytest.mark.claims(
    "Parallelism",
    "sequence parallelism through whole jobs, from one checkpoint: ZBV on 2 ranks against 2 tensor-parallel ranks without a "
    "pipeline; stock 1F1B, ZB-H2, ZBV, V-Half with full recomputation on 4 ranks (`make test-slow`)",
    "works, losses and norms within 2e-5",
)

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
@pytest.mark.sampled(0.4, group="whole jobs")
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
