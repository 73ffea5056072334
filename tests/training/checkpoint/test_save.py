"""Saving and loading where something goes wrong: writes that fail, processes that die, files that others made."""

from __future__ import annotations

import io
import os
import pickle
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.directory import tracked_iteration
from megatron.zerobubble.training.checkpoint.load import load_checkpoint
from megatron.zerobubble.training.checkpoint.save import CheckpointSaver
from tests.support.ranks import RankPool
from tests.support.training_states import train, training_state_of
from tests.training.launch import TINY_BATCH, TINY_MODEL, launch

V4 = ["--pipeline-model-parallel-size", "4", "--zero-bubble-v-schedule"]


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process, and of those it forks, may be longer than a page: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failing_saves(rank: int, folder: str) -> list[str]:
    """Errors of a save while the disk of rank 2 is full, synchronous and in the background, and when its writer is killed."""
    said = []
    for mode in ([], ["--async-save"]):
        with training_state_of(rank, [*V4, "--save", folder, *mode]) as (training_state, store):
            train(training_state, first=1, last=1)
            saver = CheckpointSaver(training_state, store)
            _save(saver, 1)
            said.append(_failure(saver, 2, full_disk if rank == 2 else _nothing))
            if mode:
                said.append(_failure(saver, 3, _killed_writer if rank == 2 else _nothing))
            _save(saver, 4 + len(mode))  # and the next one is not disturbed
    return said


def _failure(saver: CheckpointSaver, iteration: int, around: Any) -> str:
    with pytest.raises(CheckpointError) as caught, around():
        _save(saver, iteration)
    return str(caught.value)


def _save(saver: CheckpointSaver, iteration: int) -> None:
    saver.save(iteration=iteration, consumed_samples=8 * iteration)
    saver.finish()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _killed_writer() -> Iterator[None]:
    """Inside, a process that starts to write is killed."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(FileSystemWriterAsync, "write_preloaded_data", staticmethod(die)):
        yield


@pytest.mark.slow
def test_a_write_that_fails_is_raised_on_every_rank_with_its_reason(four_ranks: RankPool, tmp_path: Path) -> None:
    for said in four_ranks.run(failing_saves, str(tmp_path)):
        for iteration, reason in ((2, "File too large"), (2, "File too large"), (3, "ended before it was done")):
            text = said.pop(0)
            assert f"iter_{iteration:07d} cannot be written: rank 2: " in text
            assert reason in text
    assert tracked_iteration(tmp_path) == 5
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latest_checkpointed_iteration.txt", "iter_0000001", "iter_0000004", "iter_0000005"}


def polled_save(rank: int, folder: str) -> list[int]:
    """The iterations at whose end a background save was still in progress, on this rank."""
    with training_state_of(rank, [*V4, "--save", folder, "--async-save"]) as (training_state, store):
        train(training_state, first=1, last=1)
        saver, seen = CheckpointSaver(training_state, store), []
        saver.save(iteration=1, consumed_samples=8)
        for iteration in range(2, 200):
            train(training_state, first=2, last=2)
            saver.poll(iteration)
            if not saver.is_in_progress:
                break
            seen.append(iteration)
    return seen


@pytest.fixture(scope="module")
def saved(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], Path]:
    """The iterations per rank, and the directory with the checkpoint of iteration 1."""
    folder = tmp_path_factory.mktemp("saved")
    return four_ranks.run(polled_save, str(folder)), folder


def test_a_background_save_finishes_at_the_same_iteration_on_all_ranks(saved: tuple[list[list[int]], Path]) -> None:
    seen, folder = saved
    assert seen[0], "it is agreed on one iteration before"
    assert seen[0] == list(range(2, 2 + len(seen[0])))
    assert all(each == seen[0] for each in seen)
    assert tracked_iteration(folder) == 1


class Attack:
    """An untrusted pickle: unpickling it runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def load_tampered(rank: int, folder: str) -> str | None:
    """The reason why the checkpoint was rejected on this rank, or None. An attacker would have changed its manifest, too."""
    with training_state_of(rank, [*V4, "--load", folder, "--no-verify-checkpoint"]) as (training_state, _):
        try:
            load_checkpoint(training_state)
        except CheckpointError as error:
            return str(error)
    return None


@pytest.mark.parametrize("kind", ["noise", "code"])
def test_code_stored_as_a_tensor_is_not_run(
    kind: str, saved: tuple[list[list[int]], Path], four_ranks: RankPool, tmp_path: Path
) -> None:
    """The inspection does not read tensors, and torch's reader loads only data."""
    shutil.copytree(saved[1], tmp_path, dirs_exist_ok=True)
    directory = tmp_path / "iter_0000001"
    metadata = dcp.FileSystemReader(directory).read_metadata()
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "decoder.layers.mlp.linear_fc1.weight")
    stream = io.BytesIO()
    torch.save(Attack(tmp_path / "ran"), stream)
    written = stream.getvalue() if kind == "code" else bytes(place.length)
    assert len(written) <= place.length
    place.length = len(written)
    data = bytearray((directory / place.relative_path).read_bytes())
    data[place.offset : place.offset + len(written)] = written
    (directory / place.relative_path).write_bytes(data)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    reasons = [said for said in four_ranks.run(load_tampered, str(tmp_path)) if said is not None]
    assert len(reasons) in (1, 4), "every rank; from megatron-core 0.19 on, whose ranks read apart, the one that reads it"
    for said in reasons:
        assert str(directory) in said
        assert ("Weights only load failed" if kind == "code" else f"{place.relative_path} is damaged") in said, said
    assert not (tmp_path / "ran").exists()


ORPHAN_SCRIPT = """
import os, pathlib, signal, time
import pretrain_gpt
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.zerobubble.training.checkpoint import save

def slowly(*arguments, **options):
    pathlib.Path(__file__).with_suffix(".pids").open("a").write(f"{os.getpid()}\\n")
    time.sleep(10_000)

class Killed(save.CheckpointSaver):
    def poll(self, iteration):
        super().poll(iteration)
        if self.is_in_progress:  # the next save would wait for this one, so wait here until both ranks write
            pids = pathlib.Path(__file__).with_suffix(".pids")
            while not pids.exists() or len(set(pids.read_text().split())) < 2:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    from megatron.zerobubble.training import loop
    FileSystemWriterAsync.write_preloaded_data = staticmethod(slowly)
    loop.CheckpointSaver = Killed
    pretrain_gpt.run(pretrain_gpt.model_provider, pretrain_gpt.forward_step_provider)
"""


def test_a_process_that_writes_ends_with_its_rank(tmp_path: Path) -> None:
    """It has the job's output open, so this test would wait for it."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN_SCRIPT)
    flags = [*TINY_MODEL, *TINY_BATCH, "--mock-data", "--pipeline-model-parallel-size", "2", "--train-iters", "100000"]
    flags += ["--eval-iters", "0", "--lr-decay-iters", "10", "--log-interval", "100000"]
    done = launch([*flags, "--save", str(tmp_path), "--save-interval", "2", "--async-save"], num_ranks=2, script=script)
    assert done.returncode != 0
    assert "in the background" in done.stdout
    assert tracked_iteration(tmp_path) is None
    pids = set(script.with_suffix(".pids").read_text().split())
    assert len(pids) == 2, "one on each rank"
    until = time.monotonic() + 10.0
    while any(_runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: str) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False)
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")
