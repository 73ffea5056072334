"""What the attempts of a job share: its folder and its id."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.training.initialize import Job
from megatron.zerobubble.training.restarts.attempt import Attempt, join_attempt, leave_attempt, restarts_folder


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def launch(*, restart_count: int = 0, max_restarts: int = 2) -> Launch:
    return Launch(
        rank=0,
        local_rank=0,
        ranks_on_host=1,
        world_size=1,
        has_threads_set=True,
        restart_count=restart_count,
        max_restarts=max_restarts,
    )


def join(root: Path, *, restart_count: int = 0, max_restarts: int = 2) -> Attempt:
    job = Job(
        launch=launch(restart_count=restart_count, max_restarts=max_restarts),
        host=mock.Mock(),
        store=dist.HashStore(),
        watch=mock.Mock(),
    )  # type: ignore[arg-type]
    return join_attempt(job, root=root)


@pytest.mark.usefixtures("alone")
def test_all_attempts_of_a_job_have_one_id_and_one_folder(tmp_path: Path) -> None:
    first, second, last = (join(tmp_path, restart_count=count) for count in range(3))
    assert first.job == second.job == last.job
    assert first.folder == second.folder == restarts_folder(tmp_path, os.getppid())
    assert [each.is_restart for each in (first, second, last)] == [False, True, True]
    assert second.text == "restart 1 of 2"
    leave_attempt(last, launch())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_the_next_job_has_another_id(tmp_path: Path) -> None:
    assert join(tmp_path).job != join(tmp_path).job


@pytest.mark.usefixtures("alone")
def test_where_the_id_is_lost_later_attempts_have_a_new_one(tmp_path: Path) -> None:
    first = join(tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    second, third = (join(tmp_path, restart_count=count) for count in (1, 2))
    assert [each.is_known for each in (first, second, third)] == [True, False, True]
    assert first.job != second.job == third.job


@pytest.mark.usefixtures("alone")
def test_nothing_is_written_where_nothing_restarts_the_job(tmp_path: Path) -> None:
    attempt = join(tmp_path, max_restarts=0)
    assert attempt.is_known
    assert attempt.folder is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_folders_of_jobs_that_are_gone_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        running = restarts_folder(tmp_path, other.pid)
        name, _, start = running.name.rpartition("-")
        reused = tmp_path / f"{name}-{int(start) - 1}"  # an earlier process of the same number
        foreign = tmp_path / running.name.replace(f"-{os.geteuid()}-", "-12345-", 1)
        for folder in (running, reused, foreign):
            folder.mkdir()
            (folder / "job").touch()
        own = join(tmp_path).folder
        assert set(tmp_path.iterdir()) == {own, running, foreign}
        other.communicate(b"\n")
    assert set(tmp_path.iterdir()) == {own, running, foreign}
    join(tmp_path)
    assert set(tmp_path.iterdir()) == {own, foreign}


@pytest.mark.usefixtures("alone")
def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        join(tmp_path)
