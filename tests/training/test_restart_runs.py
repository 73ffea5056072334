"""Whole jobs whose ranks are killed: torchrun starts them again, and they resume by themselves, with the same losses."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.kills import MOST_NEW, differences, kill_ranks
from tests.training.launch import TINY_BATCH, TINY_MODEL, launch_warm, metrics, train

pytestmark = pytest.mark.claims(
    "Long runs",
    "torchrun restarts: a rank killed between an optimistic step and its validation, another before it has resumed; from "
    "`--save` alone with the checkpoint of an earlier job in it, from nothing: the losses of the "
    "undisturbed run",
    "works, bit for bit; in ten kills of 4 ranks at random moments, too (`make test-slow`); **not run on a GPU, nor on "
    "several machines**; [numbers](restarts.md)",
)

RUN = [*TINY_MODEL, *TINY_BATCH, "--pipeline-model-parallel-size", "2", "--train-iters", "8", "--eval-iters", "0"]
RUN += ["--zero-bubble-v-schedule", "--enable-optimizer-post-validation", "--post-validation-patience", "0", "--clip-grad", "0.5"]

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training import reference_trainer
from megatron.zerobubble.training import loop, step

HERE = Path(__file__).parent
ATTEMPT, RANK = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

class Killed(step.Trainer):
    def __init__(self, training_state):
        super().__init__(training_state)
        self.iteration = 0
        if (ATTEMPT, RANK) == (1, 0):
            os.kill(os.getpid(), signal.SIGKILL)

    def iterate(self, data_iterator):
        results = super().iterate(data_iterator)
        self.iteration += 1
        if (ATTEMPT, self.iteration, RANK) == (0, 5, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return results

if __name__ == "__main__":
    loop.Trainer = Killed
    reference_trainer.run(reference_trainer.model_provider, reference_trainer.forward_step_provider)
"""
"""Rank 1 is killed after its step of iteration 5, which is not validated yet. Rank 0 of the next attempt is killed before it has
resumed from anything."""


@pytest.fixture(scope="module")
def undisturbed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The metrics of a run that nobody disturbs, with dropout and optimistic steps that are clipped."""
    log = tmp_path_factory.mktemp("undisturbed") / "metrics.jsonl"
    train([*RUN, "--data-path", corpus, "--metrics-jsonl", log])
    return metrics(log)


def killed(folder: Path, *flags: object) -> str:
    """Run the job; return its output."""
    script = folder / "killed.py"
    script.write_text(KILLED)
    flags = (*RUN, *flags, "--metrics-jsonl", folder / "metrics.jsonl")
    done = launch_warm(flags, num_ranks=2, script=script, max_restarts=3)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def resumed_from(said: str) -> list[str]:
    return re.findall(r"^restart \d: (?:resuming|nothing).*", said, re.MULTILINE)


def test_a_job_resumes_from_its_own_checkpoint(corpus: str, undisturbed: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    """Only --save is given, where an earlier job has left a newer checkpoint."""
    folder = tmp_path / "checkpoints"
    train([*RUN, "--data-path", corpus, "--train-iters", "9", "--save", folder, "--seed", "7"])
    said = killed(tmp_path, "--data-path", corpus, "--save", folder, "--save-interval", "2")
    assert resumed_from(said) == [f"restart 2: resuming after iteration 4, from {folder / 'iter_0000004'}"]
    assert differences(metrics(tmp_path / "metrics.jsonl"), undisturbed) == []
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "8\n"
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_job_that_saved_nothing_starts_again(corpus: str, undisturbed: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    said = killed(tmp_path, "--data-path", corpus)
    nothing = "nothing that this job has saved can be resumed from: starting from newly initialized weights, at iteration 0"
    assert resumed_from(said) == [f"restart 2: {nothing}"]
    assert differences(metrics(tmp_path / "metrics.jsonl"), undisturbed) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_kills_change_no_loss(tmp_path: Path) -> None:
    """4 ranks, cold starts; random ranks at random moments, a checkpoint every second iteration."""
    num_kills = 10
    flags = [*TINY_MODEL, *TINY_BATCH, "--mock-data", "--pipeline-model-parallel-size", "2", "--enable-zero-bubble"]
    flags += ["--eval-iters", "0", "--lr-decay-iters", "100", "--train-iters", str(num_kills * (MOST_NEW + 2) + 2)]
    (tmp_path / "undisturbed").mkdir()
    undisturbed = kill_ranks(flags, num_ranks=4, folder=tmp_path / "undisturbed", num_kills=0, seed=0)
    saves = ["--save", tmp_path / "checkpoints", "--save-interval", "2"]
    job = kill_ranks([*flags, *saves], num_ranks=4, folder=tmp_path, num_kills=num_kills, seed=2)
    assert (undisturbed.exit_code, job.exit_code) == (0, 0), job.output[-4000:]
    assert differences(job.metrics, undisturbed.metrics) == []
    assert max(job.redone) <= 3, "two between checkpoints, and the one that was under way"
