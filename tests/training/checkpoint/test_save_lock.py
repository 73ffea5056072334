"""Two jobs with one --save directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint import save_lock, shared
from megatron.zerobubble.training.checkpoint.save_lock import LOCK, hold_save_directory
from tests.support.ranks import RankPool

HOLDS = """
import sys, time
from pathlib import Path
from megatron.zerobubble.training.checkpoint.save_lock import _taken
_taken(Path(sys.argv[1]), sys.argv[2])
print("holds", flush=True)
time.sleep(600)
"""


@contextmanager
def another_job(folder: Path, run: str) -> Iterator[subprocess.Popen[str]]:
    """Rank 0 of a job that saves there."""
    words = [sys.executable, "-c", HOLDS, str(folder), run]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


def enter(rank: int, folder: str, run: str) -> str:
    """What holding the directory comes to on one rank; on rank 0 also who the file says holds it meanwhile."""
    with mock.patch.object(shared, "_PATIENCE_S", 0.0):
        try:
            with hold_save_directory(folder, run=run):
                return json.loads(Path(folder, LOCK).read_text())["run"] if rank == 0 else "held"
        except CheckpointError as error:
            return str(error)


@pytest.mark.claims("Long runs", "two jobs with one `--save`", "the second is rejected in one line on every rank")
def test_a_second_job_is_refused_on_all_ranks_until_the_first_has_ended(two_ranks: RankPool, tmp_path: Path) -> None:
    with another_job(tmp_path, "abc") as first:
        expected = f"--save {tmp_path} is in use: process {first.pid} on {os.uname().nodename} (run abc) writes its checkpoints"
        for text in two_ranks.run(enter, str(tmp_path), "xyz"):
            assert text.startswith(expected)
        assert two_ranks.run(enter, str(tmp_path), "abc") == ["abc", "held"], "a restart, whose first attempt is not gone yet"
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / LOCK).exists()
        assert two_ranks.run(enter, str(tmp_path), "xyz") == ["xyz", "held"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_removed_before_it_was_locked_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    """The job that held it removes it at its end."""
    lockf, removed = save_lock.fcntl.lockf, []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(1)
            (tmp_path / LOCK).unlink()
        lockf(descriptor, how)

    with mock.patch.object(save_lock.fcntl, "lockf", late):
        (descriptor,) = save_lock._taken(tmp_path, "abc")
    assert os.path.samestat(os.fstat(descriptor), (tmp_path / LOCK).stat())
    os.close(descriptor)


def test_a_file_system_without_locks_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(save_lock.fcntl, "lockf", side_effect=OSError(37, "No locks available")):
        assert save_lock._taken(tmp_path, "abc") == []
    assert caplog.messages == [f"--save {tmp_path} is not locked against other jobs: No locks available"]
