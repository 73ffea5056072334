"""A job moves between Megatron-LM's own training loop and pretrain_gpt.py by its checkpoint, and goes on as if it had stayed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.megatron_lm import MISSING, logged, pretrain
from tests.support.ranks import RankPool
from tests.training.launch import TINY_BATCH, TINY_MODEL, metrics, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason=MISSING),
    pytest.mark.claims(
        "Your own script",
        "a job that moves from Megatron-LM's loop to `pretrain_gpt.py`, ZB-H1 and ZBV, plain and distributed optimizer, or "
        "back (plain; `make test-slow`, megatron-core 0.19.2)",
        "works, the losses to seven digits",
    ),
]

TWO = (
    "--pipeline-model-parallel-size 2 --train-iters 6 --lr-decay-iters 100 --split 90,10,0 --untie-embeddings-and-output-weights"
)
BYTES = "--vocab-size 255 --make-vocab-size-divisible-by 128 --eval-interval 100"
"""A tokenizer of Megatron-LM with as many tokens as ours for bytes."""
RUN = [*TINY_MODEL, *TINY_BATCH, *TWO.split(), "--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0"]


def theirs(ranks: RankPool, flags: str) -> dict[int, float]:
    """The losses that Megatron-LM's loop logs, by iteration."""
    printed = logged(ranks.run(pretrain, f"{TWO} {BYTES} {flags}")[-1])
    return {int(name): float(values[0]) for name, values in printed.items() if name.isdecimal()}


def ours(folder: Path, *flags: object) -> dict[int, float]:
    """The losses of a job of pretrain_gpt.py, by iteration."""
    train([*RUN, "--metrics-jsonl", folder / "metrics.jsonl", *flags])
    return {iteration: fields["loss"] for iteration, fields in metrics(folder / "metrics.jsonl").items()}


@pytest.mark.parametrize("sharded", [[], ["--use-distributed-optimizer"]], ids=["plain", "distributed"])
@pytest.mark.parametrize("schedule", [["--enable-zero-bubble"], ["--zero-bubble-v-schedule"]], ids=["zb-h1", "zbv"])
def test_from_its_loop_to_ours(two_ranks: RankPool, corpus: str, tmp_path: Path, schedule: list[str], sharded: list[str]) -> None:
    """Losses to seven digits, which is what it prints."""
    per_parameter = ["--dist-ckpt-optim-fully-reshardable"] if sharded else []
    save = f"--save {tmp_path / 'theirs'} --save-interval 3 --data-path {corpus} {' '.join(sharded + per_parameter)}"
    expected = theirs(two_ranks, save)
    actual = ours(tmp_path, "--data-path", corpus, "--load", tmp_path / "theirs", "--ckpt-step", 3, *schedule, *sharded)
    assert sorted(actual) == [4, 5, 6]
    assert actual == {iteration: pytest.approx(expected[iteration], rel=1e-6) for iteration in actual}


@pytest.mark.parametrize("schedule", [["--enable-zero-bubble"], ["--zero-bubble-v-schedule"]], ids=["zb-h1", "zbv"])
def test_from_ours_to_its_loop(two_ranks: RankPool, corpus: str, tmp_path: Path, schedule: list[str]) -> None:
    """Without the distributed optimizer, whose state its loop does not load into an optimizer of torch's.

    The second line that its loop logs after a start is the mean of two iterations, whatever it loaded.
    """
    expected = ours(tmp_path, "--data-path", corpus, "--save", tmp_path / "ours", "--save-interval", 3, *schedule)
    actual = theirs(two_ranks, f"--load {tmp_path / 'ours'} --ckpt-step 3 --data-path {corpus}")
    expected[5] = (expected[4] + expected[5]) / 2
    assert sorted(actual) == [4, 5, 6]
    assert actual == {iteration: pytest.approx(expected[iteration], rel=1e-6) for iteration in actual}
