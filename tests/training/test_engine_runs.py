"""Whole jobs of `pretrain_gpt.py --transformer-impl transformer_engine` on Transformer Engine's real Python, in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.launch import ROOT, TINY_BATCH, TINY_MODEL, launch, metrics

SCRIPT = ROOT / "tests" / "support" / "transformer_engine" / "pretrain.py"
ENGINE = [*TINY_MODEL, *TINY_BATCH, "--transformer-impl", "transformer_engine", "--bf16", "--mock-data", "--eval-iters", "0"]
ENGINE += ["--hidden-dropout", "0", "--attention-dropout", "0", "--train-iters", "4"]
ENGINE += ["--fp8-format", "hybrid", "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"]
V = ["--pipeline-model-parallel-size", "2", "--zero-bubble-v-schedule"]
CLIPPED = ["--enable-optimizer-post-validation", "--clip-grad", "1e-2"]
H1 = ["--pipeline-model-parallel-size", "2", "--enable-zero-bubble"]


class Run:
    """A job that succeeded."""

    def __init__(self, folder: Path, flags: list[Any], num_ranks: int) -> None:
        folder.mkdir(exist_ok=True)
        arguments = [*ENGINE, *flags, "--metrics-jsonl", folder / "metrics.jsonl"]
        done = launch(arguments, num_ranks=num_ranks, script=SCRIPT)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        self.log = done.stdout
        self.results = {
            iteration: (fields["loss"], fields["grad_norm"]) for iteration, fields in metrics(folder / "metrics.jsonl").items()
        }


@pytest.fixture(scope="module")
def saved(engine_wheel: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """ZB-H1 with a checkpoint after two of four iterations."""
    folder = tmp_path_factory.mktemp("engine")
    return folder, Run(folder, [*H1, "--save", folder / "checkpoints", "--save-interval", "2"], 2)


def test_a_continued_run_is_bit_for_bit_the_same(saved: tuple[Path, Run], tmp_path: Path) -> None:
    """The scales of FP8 and their histories are in the checkpoint."""
    folder, whole = saved
    continued = Run(tmp_path, [*H1, "--load", folder / "checkpoints", "--ckpt-step", "2"], 2)
    assert continued.results == {iteration: whole.results[iteration] for iteration in (3, 4)}


def test_the_run_of_one_rank(saved: tuple[Path, Run], tmp_path: Path) -> None:
    """Without a pipeline the norm is summed over all parameters at once: 1e-5. The losses are those of bf16, to the bit."""
    _, whole = saved
    one = Run(tmp_path, [], 1)
    assert {iteration: loss for iteration, (loss, _) in one.results.items()} == {
        iteration: loss for iteration, (loss, _) in whole.results.items()
    }
    for iteration, (_, norm) in one.results.items():
        assert whole.results[iteration][1] == pytest.approx(norm, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [V, [*V, *CLIPPED]], ids=["zbv", "optimistic"])
def test_other_schedules(saved: tuple[Path, Run], tmp_path: Path, flags: list[str]) -> None:
    clipped = ["--clip-grad", "1e-2"] if "--clip-grad" in flags else []
    reference = saved[1] if not clipped else Run(tmp_path / "reference", [*H1, *clipped], 2)
    other = Run(tmp_path / "other", flags, 2)
    for iteration, (loss, norm) in other.results.items():
        assert (loss, norm) == pytest.approx(reference.results[iteration], rel=1e-3)
