"""The --save directory: whenever a job dies, the latest checkpoint is complete, and hosts that do not share it are refused.

Each rank has a working directory of its own and a relative path to the checkpoints, as two machines that have the same path on
their own disks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint import shared
from megatron.zerobubble.training.checkpoint.directory import TRACKER, existing_directory, prepare, publish, tracked_iteration
from megatron.zerobubble.training.checkpoint.save import save_checkpoint
from megatron.zerobubble.training.checkpoint.shared import check_all_hosts_see, check_save_directory, wait_for_files
from tests.support.ranks import RankPool
from tests.support.training_states import train, training_state_of

pytestmark = [
    pytest.mark.claims(
        "Long runs",
        "checkpoints: a job killed at any moment leaves the latest; failing writes are reported to every rank",
        "works",
        also=("training/checkpoint/test_save.py",),
    ),
    pytest.mark.claims(
        "Long runs",
        "hosts that do not share the `--save` directory, or do not see the checkpoint of `--load`; ranks with working directories"
        " of their own stand for them. Not tried on a network file system",
        "rejected on every rank in one line, nothing is published, nothing left behind",
    ),
]


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


@pytest.mark.parametrize("content", [b"release\xff", b"1" * 5000, b"9" * 400, b"\n" * 9, b"-3", None])
def test_a_tracker_of_any_content_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    assert tracked_iteration(tmp_path) is None
    (tmp_path / TRACKER).mkdir() if content is None else (tmp_path / TRACKER).write_bytes(content)
    expected = "cannot be read: Is a directory" if content is None else "is damaged: it holds "
    with pytest.raises(CheckpointError, match=f"{TRACKER} {expected}") as caught:
        tracked_iteration(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


PATIENCE_S = 0.5
"""A disk here shows its files at once."""


@contextmanager
def own_host(rank: int, folder: str, *, apart: int) -> Iterator[None]:
    """Inside, rank `apart` has a working directory of its own, and the others have one together."""
    before, host = Path.cwd(), Path(folder, "other" if rank == apart else "first")
    host.mkdir(exist_ok=True)
    os.chdir(host)
    try:
        with mock.patch.object(shared, "_PATIENCE_S", PATIENCE_S):
            yield
    finally:
        os.chdir(before)


def saved_apart(rank: int, folder: str) -> tuple[str, set[str]]:
    """The error of a save in a directory that rank 3 does not share, and the names in the directory that this rank sees."""
    arguments = ["--pipeline-model-parallel-size", "4", "--zero-bubble-v-schedule", "--save", "checkpoints"]
    with own_host(rank, folder, apart=3):
        with training_state_of(rank, arguments) as training_state:
            train(training_state, first=1, last=1)
            with pytest.raises(CheckpointError) as caught:
                save_checkpoint(training_state, run="a", iteration=1, consumed_samples=8)
        return str(caught.value), {path.name for path in Path("checkpoints").iterdir()}


def test_a_checkpoint_whose_files_rank_0_does_not_see_is_not_published(four_ranks: RankPool, tmp_path: Path) -> None:
    for said, names in four_ranks.run(saved_apart, str(tmp_path)):
        assert "__3_0.distcp is missing" in said
        assert "directory that all hosts share" in said
        assert names == set()


def refused(rank: int, folder: str) -> str:
    """The error where rank 2 does not share the directory."""
    with own_host(rank, folder, apart=2), pytest.raises(CheckpointError) as caught:
        check_save_directory("checkpoints")
    return str(caught.value)


def test_every_rank_raises_the_same_line(four_ranks: RankPool, tmp_path: Path) -> None:
    (line,) = set(four_ranks.run(refused, str(tmp_path)))
    assert "(rank 2): No such file or directory" in line
    assert list((tmp_path / "first" / "checkpoints").iterdir()) == []


def unseen(rank: int, folder: str) -> str:
    """The error where rank 2 does not see the checkpoint that is loaded."""
    with own_host(rank, folder, apart=2), pytest.raises(CheckpointError) as caught:
        check_all_hosts_see(Path("iter_0000001", "metadata.json"), "iter_0000001")
    return str(caught.value)


def test_a_checkpoint_that_a_host_does_not_see_is_not_loaded(four_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "first" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "first" / "iter_0000001" / "metadata.json").touch()
    (line,) = set(four_ranks.run(unseen, str(tmp_path)))
    assert line.startswith("iter_0000001 is not the same directory on all hosts")
    assert f"{os.uname().nodename} (rank 2): No such file or directory" in line


def test_a_save_directory_that_cannot_be_made_is_one_line(four_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "checkpoints").write_text("a file")
    for line in four_ranks.run(refused, str(tmp_path)):
        assert line == "--save checkpoints cannot be written: File exists"


def test_a_file_that_a_network_file_system_shows_late_is_waited_for() -> None:
    seen = iter(["missing", "missing", ""])
    assert wait_for_files(lambda: next(seen)) == ""
