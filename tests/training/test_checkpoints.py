"""Checkpoints: a run continues bit for bit, by itself after kills at any moment, and a damaged file is refused by its name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.directory import (
    MANIFEST,
    TRACKER,
    damage,
    existing_directory,
    prepare,
    publish,
    read_manifest,
    record_of,
    tracked_iteration,
    writing_directory,
)
from tests.training.kills import MOST_NEW, differences, kill_ranks
from tests.training.launch import ROOT, TINY_BATCH, TINY_MODEL, command, environment, launch_warm, metrics, train

RUN = [*TINY_MODEL, *TINY_BATCH, "--pipeline-model-parallel-size", "2", "--train-iters", "8", "--eval-iters", "0"]
RUN += ["--zero-bubble-v-schedule", "--enable-optimizer-post-validation", "--post-validation-patience", "0", "--clip-grad", "0.5"]
"""With dropout, and steps of which most are redone."""

KILLED = """
import os, signal
from megatron.zerobubble.cli.run import run_itself

ATTEMPT, RANK = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

if __name__ == "__main__":
    zero_bubble = globals().get("__zero_bubble__")
    if zero_bubble is None:
        run_itself(__file__)
    else:
        from megatron.zerobubble.training import trainer

        class Killed(trainer.Trainer):
            def __init__(self, *given, **named):
                if (ATTEMPT, RANK) == (1, 0):
                    os.kill(os.getpid(), signal.SIGKILL)
                super().__init__(*given, **named)

            def iterate(self, data):
                done = super().iterate(data)
                if (ATTEMPT, self.iteration, RANK) == (0, 5, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                return done

        trainer.Trainer = Killed
        trainer.main(zero_bubble)
"""
"""Rank 1 is killed after its step of iteration 5, which is not validated yet. Rank 0 of the next attempt is killed before it has
resumed from anything."""


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nobody disturbs: metrics.jsonl, and in `saved` checkpoints of iterations 4 and 8."""
    folder = tmp_path_factory.mktemp("whole")
    saves = ["--save", folder / "saved", "--save-interval", "4", "--metrics-jsonl", folder / "metrics.jsonl"]
    train([*RUN, "--data-path", corpus, *saves])
    return folder


def after(iteration: int, whole: Path) -> dict[int, dict[str, Any]]:
    return {number: fields for number, fields in metrics(whole / "metrics.jsonl").items() if number > iteration}


@pytest.mark.claims(
    "Long runs",
    "a run that is saved and continued, with dropout, optimistic steps and the distributed optimizer",
    "works, the losses, norms and learning rates bit for bit",
)
@pytest.mark.smoke
def test_a_continued_run_is_bit_for_bit_the_same(whole: Path, corpus: str, tmp_path: Path) -> None:
    load = ["--load", whole / "saved", "--ckpt-step", "4", "--metrics-jsonl", tmp_path / "metrics.jsonl"]
    train([*RUN, "--data-path", corpus, *load])
    assert differences(metrics(tmp_path / "metrics.jsonl"), after(4, whole)) == []
    assert sorted(path.name for path in (whole / "saved").iterdir()) == ["iter_0000004", "iter_0000008", TRACKER]


OPTIMIZERS = {
    "distributed, bf16": ["--use-distributed-optimizer", "--bf16", "--overlap-grad-reduce", "--overlap-param-gather"],
    "fp16": ["--fp16", "--initial-loss-scale", "65536"],
    "sgd, experts": ["--optimizer", "sgd", "--num-experts", "4", "--expert-model-parallel-size", "2", "--disable-bias-linear"],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(0.3, group="whole jobs")
def test_so_is_one_with_another_optimizer(name: str, corpus: str, tmp_path: Path) -> None:
    """On four ranks, two of which share a stage."""
    flags = [*RUN, *OPTIMIZERS[name], "--data-path", corpus]
    train(
        [*flags, "--save", tmp_path / "saved", "--save-interval", "4", "--metrics-jsonl", tmp_path / "metrics.jsonl"], num_ranks=4
    )
    load = ["--load", tmp_path / "saved", "--ckpt-step", "4", "--metrics-jsonl", tmp_path / "again.jsonl"]
    train([*flags, *load], num_ranks=4)
    assert differences(metrics(tmp_path / "again.jsonl"), after(4, tmp_path)) == []


@pytest.mark.claims(
    "Long runs",
    "torchrun restarts: a rank killed between an optimistic step and its validation, another before it has resumed; from "
    "`--save` alone with the checkpoint of an earlier job in it: the losses of the undisturbed run",
    "works, bit for bit; in ten kills of 4 ranks at random moments, too (`make test-slow`); **not run on a GPU, nor on "
    "several machines**; [numbers](restarts.md)",
)
@pytest.mark.sampled(0.3, group="whole jobs")
def test_a_killed_job_resumes_from_its_own_checkpoint(whole: Path, corpus: str, tmp_path: Path) -> None:
    """Only --save is given, where an earlier job has left a newer checkpoint."""
    folder, script = tmp_path / "checkpoints", tmp_path / "killed.py"
    shutil.copytree(whole / "saved", folder)
    script.write_text(KILLED)
    saves = ["--save", folder, "--save-interval", "2", "--metrics-jsonl", tmp_path / "metrics.jsonl"]
    done = launch_warm([*RUN, "--data-path", corpus, *saves], num_ranks=2, script=script, max_restarts=3)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    resumed = re.findall(r"^restart \d: (?:resuming|nothing).*", done.stdout, re.MULTILINE)
    assert resumed == [f"restart 2: resuming after iteration 4, from {folder / 'iter_0000004'}"]
    assert differences(metrics(tmp_path / "metrics.jsonl"), after(0, whole)) == []


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


@pytest.mark.sampled(0.3, group="whole jobs")
def test_a_signal_ends_a_run_with_a_checkpoint(corpus: str, tmp_path: Path) -> None:
    flags = [*RUN, "--data-path", corpus, "--exit-signal-handler", "--train-iters", "100000", "--lr-decay-iters", "8"]
    flags += ["--eval-iters", "1", "--eval-interval", "100000", "--save", tmp_path]
    options: dict[str, Any] = {"text": True, "env": environment(PYTHONUNBUFFERED="1"), "cwd": ROOT}
    with subprocess.Popen(command(flags, num_ranks=2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as job:
        assert job.stdout is not None
        said = ""
        for line in job.stdout:
            said += line
            if " iteration        4/" in line:
                job.terminate()
    (left,) = set(re.findall(r"exiting at iteration (\d+) \(on SIGTERM\)", said))
    assert (tmp_path / TRACKER).read_text().strip() == left
    assert "validation loss" not in said, "there may be little time"


# -- refusals -------------------------------------------------------------------------------------------------------------


def refused(corpus: str, *flags: object) -> str:
    """The one line with which a job ends."""
    done = launch_warm([*RUN, "--data-path", corpus, *flags], num_ranks=2)
    assert done.returncode != 0
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
    return line


def test_a_damaged_file_is_refused_by_name(whole: Path, corpus: str, tmp_path: Path) -> None:
    """One bit of a tensor, in a file that torch would load."""
    shutil.copytree(whole / "saved", tmp_path / "saved")
    file = max((tmp_path / "saved" / "iter_0000008").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    line = refused(corpus, "--load", tmp_path / "saved")
    assert f"{file.parent}: {file.name} is damaged or of another run: its content is not what was saved" in line
    assert main(["checkpoint", "verify", str(tmp_path / "saved")]) == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--hidden-size", "64"], "cannot be loaded into this model"),
        (["--enable-zero-bubble"], "its ranks had other parts of the model or of the optimizer: give --no-load-optim"),
        (["--lr", "0.02"], "learning rate"),
    ],
)
@pytest.mark.sampled(0.5)
def test_another_model_layout_or_schedule_of_learning_rates_is_refused(
    flags: list[str], reason: str, whole: Path, corpus: str
) -> None:
    base = [each for each in RUN if each != "--zero-bubble-v-schedule" or flags != ["--enable-zero-bubble"]]
    done = launch_warm([*base, "--data-path", corpus, "--load", whole / "saved", *flags], num_ranks=2)
    assert done.returncode != 0
    assert reason in done.stderr, done.stderr


@pytest.mark.sampled(0.5)
def test_weights_alone_load_into_another_layout(whole: Path, corpus: str, tmp_path: Path) -> None:
    flags = [*TINY_MODEL, *TINY_BATCH, "--hidden-dropout", "0", "--attention-dropout", "0", "--data-path", corpus]
    flags += ["--load", whole / "saved", "--ckpt-step", "4", "--no-load-optim", "--train-iters", "5", "--eval-iters", "0"]
    train([*flags, "--metrics-jsonl", tmp_path / "one.jsonl"], num_ranks=1)
    train([*flags, "--pipeline-model-parallel-size", "2", "--metrics-jsonl", tmp_path / "two.jsonl"])
    one, two = metrics(tmp_path / "one.jsonl"), metrics(tmp_path / "two.jsonl")
    assert sorted(one) == [5]
    assert one[5]["loss"] == pytest.approx(two[5]["loss"], rel=1e-6)


# -- the directory --------------------------------------------------------------------------------------------------------


def save(folder: Path, iteration: int, text: str) -> None:
    prepare(folder, iteration)
    file = writing_directory(folder, iteration) / "data"
    file.write_text(text)
    publish(folder, iteration, run="a", files={"data": record_of(file)})


def test_a_save_that_dies_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    save(tmp_path, 5, "old")
    prepare(tmp_path, 6)
    (writing_directory(tmp_path, 6) / "data").write_text("half")
    assert tracked_iteration(tmp_path) == 5
    (tmp_path / "iter_0000005").rename(tmp_path / "iter_0000005.replaced")  # died while it was replaced
    assert (existing_directory(tmp_path, 5) / "data").read_text() == "old"
    save(tmp_path, 5, "new")
    assert (existing_directory(tmp_path, 5) / "data").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", TRACKER]


def cut(file: Path) -> None:
    file.write_text("ol")


def change(file: Path) -> None:
    file.write_text("new")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(Path.unlink, "is missing"), (cut, "has 2 bytes instead of 3"), (change, "its content is not what was saved")],
)
def test_each_kind_of_damage_is_named(harm: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    save(tmp_path, 5, "old")
    directory = tmp_path / "iter_0000005"
    files = read_manifest(directory)["files"]
    assert damage(directory, files, files) == {}
    harm(directory / "data")
    (found,) = damage(directory, files, files).values()
    assert reason in found


def test_a_damaged_manifest_or_tracker_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5, "old")
    file = tmp_path / "iter_0000005" / MANIFEST
    named = json.loads(file.read_text())
    file.write_text(json.dumps(named | {"run": "b"}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: its checksum is not that of its content"):
        read_manifest(file.parent)
    (tmp_path / TRACKER).write_text("five")
    with pytest.raises(CheckpointError, match="is damaged: it holds 'five', not an iteration"):
        tracked_iteration(tmp_path)
