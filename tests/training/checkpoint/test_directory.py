"""The --save directory: whenever a job dies, the latest checkpoint is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.directory import TRACKER, existing_directory, prepare, publish, tracked_iteration

pytestmark = pytest.mark.claims(
    "Long runs",
    "checkpoints: a job killed at any moment leaves the latest; failing writes are reported to every rank",
    "works",
    also=("training/checkpoint/test_save.py",),
)


class Killed(BaseException):
    """Simulates the end of the process."""


def write(folder: Path, iteration: int, content: str) -> None:
    writing = prepare(folder, iteration)
    for name in ("a", "b"):
        (writing / name).write_text(content)


def latest(folder: Path) -> str:
    """The contents of the checkpoint that a run would load; all files must be of one save."""
    iteration = tracked_iteration(folder)
    assert iteration is not None
    directory = existing_directory(folder, iteration)
    assert {path.name for path in directory.iterdir()} == {"a", "b"}
    (content,) = {path.read_text() for path in directory.iterdir()}
    return content


def die_at(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on the process dies before its `number`-th change on disk; the list collects the changes before."""
    done: list[str] = []

    def dying(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **options: Any) -> Any:
            if len(done) == number:
                raise Killed
            done.append(name)
            return change(*arguments, **options)

        return instead

    for owner, name in ((os, "fsync"), (os, "mkdir"), (Path, "rename"), (Path, "replace"), (Path, "write_text")):
        monkeypatch.setattr(owner, name, dying(name, getattr(owner, name)))
    monkeypatch.setattr(shutil, "rmtree", dying("rmtree", shutil.rmtree))
    return done


@pytest.mark.parametrize("iteration", [3, 6], ids=["of the same iteration", "of a later one"])
def test_a_job_that_dies_at_any_moment_leaves_the_latest(iteration: int, tmp_path: Path) -> None:
    """The next job saves again, dies at the next moment, and so on until it comes through."""
    write(tmp_path, 3, "first")
    publish(tmp_path, 3)
    for moment in range(100):
        with pytest.MonkeyPatch.context() as monkeypatch:
            done = die_at(moment, monkeypatch)
            try:
                write(tmp_path, iteration, f"new {moment}")
                publish(tmp_path, iteration)
                break
            except Killed:
                assert len(done) == moment
        expected = "first" if tracked_iteration(tmp_path) == 3 and iteration == 6 else latest(tmp_path)
        assert latest(tmp_path) == expected
    assert moment > 10, done
    assert latest(tmp_path) == f"new {moment}"
    assert {path.name for path in tmp_path.iterdir()} == {TRACKER, "iter_0000003", f"iter_{iteration:07d}"}, "no more"


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("iter_0000001.writing", "iter_0000001.mine", "notes.writing"):
        (tmp_path / name).mkdir()
    write(tmp_path, 2, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001.mine", "notes.writing", "iter_0000002.writing"}


def test_a_damaged_tracker_is_an_error(tmp_path: Path) -> None:
    assert tracked_iteration(tmp_path) is None
    (tmp_path / TRACKER).write_bytes(b"release\xff")
    with pytest.raises(CheckpointError, match=rf"{TRACKER} is damaged: it holds 'release.', not an iteration"):
        tracked_iteration(tmp_path)


@pytest.mark.parametrize("content", [b"1" * 5000, b"9" * 400, b"\n" * 9, b"-3"])
def test_a_tracker_of_any_content_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{TRACKER} is damaged: it holds ") as caught:
        tracked_iteration(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_a_tracker_that_is_a_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(CheckpointError, match=rf"{TRACKER} cannot be read: Is a directory"):
        tracked_iteration(tmp_path)
