"""TensorBoard curves are read back; a stand-in replaces Weights & Biases, which is not installed."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings

with quiet_third_parties():
    from megatron.zerobubble.training.metrics.curves import Curves

FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --mock-data "
)


def settings(flags: str) -> Settings:
    return settings_from_argv((FLAGS + flags).split(), world_size=1)


class WandbStandIn(types.ModuleType):
    """The three calls of wandb that are used; records their arguments."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: dict[str, Any] = {}
        self.points: list[dict[str, Any]] = []
        self.axis: str | None = None
        self.is_finished = False

    def init(self, **given: Any) -> WandbStandIn:
        self.started = given
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert name == "*"
        self.axis = step_metric

    def log(self, point: dict[str, Any]) -> None:
        self.points.append(point)

    def finish(self) -> None:
        self.is_finished = True


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    curves = Curves(settings(f"--tensorboard-dir {tmp_path}"), start_iteration=0)
    curves.add({"loss": 2.5, "schedule": "zbv", "skipped": False}, 3)
    curves.add({"loss": 2.25}, 4)
    curves.flush()
    curves.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "skipped"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 2.5), (4, 2.25)]


def test_wandb_gets_points_with_their_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = WandbStandIn()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    curves = Curves(settings("--wandb-project zb --wandb-exp-name first --wandb-save-dir out"), start_iteration=0)
    curves.add({"loss": 2.5, "schedule": "zbv"}, 9)
    curves.add({"pipeline/span_ms": 3.0}, 4)
    curves.close()
    assert {name: stand_in.started[name] for name in ("project", "name", "dir")} == {
        "project": "zb",
        "name": "first",
        "dir": "out",
    }
    assert stand_in.started["config"]["model"]["num_layers"] == 2
    assert stand_in.axis == "iteration"
    assert stand_in.points == [{"loss": 2.5, "iteration": 9}, {"pipeline/span_ms": 3.0, "iteration": 4}]
    assert stand_in.is_finished


def test_without_wandb_a_warning_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it then fails
    with caplog.at_level(logging.WARNING, "megatron.zerobubble.training.metrics.curves"):
        curves = Curves(settings("--wandb-project zb"), start_iteration=0)
    curves.add({"loss": 2.5}, 1)
    curves.close()
    assert "--wandb-project zb: wandb is not installed (pip install wandb); it gets no curves" in caplog.text


def test_without_flags_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    curves = Curves(settings(""), start_iteration=0)
    curves.add({"loss": 2.5}, 1)
    curves.flush()
    curves.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread raises, too
def test_tensorboard_files_that_cannot_be_written_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, before = tmp_path / "events", threading.active_count()
    curves = Curves(settings(f"--tensorboard-dir {folder}"), start_iteration=0)
    curves.add({"loss": 2.5}, 1)
    curves.flush()
    shutil.rmtree(folder)
    folder.write_text("in the way")
    for iteration in (2, 3, 4):
        curves.add({"loss": 2.5}, iteration)
        curves.flush()
    curves.close()
    assert threading.active_count() == before, "TensorBoard's thread would fail once more, later"
    (warning,) = (message for message in caplog.messages if "tensorboard" in message)
    assert warning == f"--tensorboard-dir {folder} cannot be written: Not a directory; training goes on, and its curves end here"
