"""Whole jobs of `pretrain_gpt.py --transformer-impl transformer_engine` on Transformer Engine's real Python, in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.support.transformer_engine import chosen_version
from tests.training.launch import ROOT, TINY_BATCH, TINY_MODEL, launch, metrics

pytestmark = pytest.mark.claims(
    "Layers",
    "whole jobs in FP8 with delayed scaling and Transformer Engine's Adam: ZB-H1 is saved, and continues under ZB-H1 and on "
    "one rank without a pipeline, with the scales and their histories; ZBV, also with optimistic steps, with tensorwise "
    "scaling (`make test-slow`)",
    "works, the losses bit for bit (norms without a pipeline 1e-5)",
)

SCRIPT = ROOT / "tests" / "support" / "transformer_engine" / "pretrain.py"
ENGINE = [*TINY_MODEL, *TINY_BATCH, "--transformer-impl", "transformer_engine", "--bf16", "--mock-data", "--eval-iters", "0"]
ENGINE += [
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
    "--train-iters",
    "4",
    "--clip-grad",
    "0",
    "--fp8-format",
    "hybrid",
]
ENGINE += ["--untie-embeddings-and-output-weights"]  # the gradient of tied ones is a sum in another order
DELAYED = ["--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"]
TENSORWISE = ["--fp8-recipe", "tensorwise"]
H1 = ["--pipeline-model-parallel-size", "2", "--enable-zero-bubble"]
ZBV = ["--pipeline-model-parallel-size", "2", "--zero-bubble-v-schedule"]
LEAVE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Transformer Engine 2.20 asks for leave to load what it pickled itself: the scales and their histories."""


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


def _saved(folder: Path, flags: list[Any]) -> tuple[Path, Run]:
    checkpoints = folder / "checkpoints"
    return checkpoints, Run(folder, [*flags, "--save", checkpoints, "--save-interval", "2"], 2)


@pytest.fixture(scope="module")
def saved(engine_wheel: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """ZB-H1 with a checkpoint after two of four iterations."""
    return _saved(tmp_path_factory.mktemp("engine"), [*H1, *DELAYED])


@pytest.mark.parametrize(("flags", "num_ranks"), [(H1, 2), ([], 1)], ids=["zb-h1", "no pipeline"])
@pytest.mark.slow
def test_a_continued_run_has_the_same_losses(
    saved: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], num_ranks: int
) -> None:
    """Bit for bit, also without a pipeline: the checkpoint has the scales of each layer, and W in a pass of its own reads the
    operands that were quantized with them. The norm is summed in another order there: 1e-5."""
    checkpoints, whole = saved
    monkeypatch.setenv(LEAVE, "1")
    continued = Run(tmp_path, [*flags, *DELAYED, "--load", checkpoints, "--ckpt-step", "2"], num_ranks)
    for iteration, (loss, norm) in continued.results.items():
        assert loss == whole.results[iteration][0]
        assert norm == pytest.approx(whole.results[iteration][1], rel=1e-5 if num_ranks == 1 else 0.0)
    assert sorted(continued.results) == [3, 4]


@pytest.mark.slow
def test_without_leave_to_load_scales_the_reason_is_one_line(saved: tuple[Path, Run], tmp_path: Path) -> None:
    if Version(chosen_version()) < Version("2.20"):
        pytest.skip("this release loads what it pickled without asking")
    done = launch([*ENGINE, *H1, *DELAYED, "--load", saved[0]], num_ranks=2, script=SCRIPT)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: /")]
    assert len(told) == 1
    assert LEAVE in told[0]


@pytest.mark.slow
def test_v_and_optimistic_steps(engine_wheel: None, tmp_path: Path) -> None:
    """With tensorwise scaling; delayed scales of two chunks advance with the forwards of both."""
    checkpoints, whole = _saved(tmp_path / "zb-h1", [*H1, *TENSORWISE])
    loaded = [*ZBV, *TENSORWISE, "--load", checkpoints, "--ckpt-step", "2"]
    found = Run(tmp_path / "zbv", loaded, 2)
    assert [found.results[iteration][0] for iteration in (3, 4)] == [whole.results[iteration][0] for iteration in (3, 4)]
    clipped = [*loaded, "--clip-grad", "1e-2"]
    optimistic = Run(tmp_path / "optimistic", [*clipped, "--enable-optimizer-post-validation"], 2)
    assert optimistic.results == Run(tmp_path / "synchronous", clipped, 2).results
