"""Saving where something goes wrong: writes that fail."""

from __future__ import annotations

import errno
import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.checkpoint.filesystem import FileSystem

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.files import disk_error
from megatron.zerobubble.training.checkpoint.directory import tracked_iteration
from megatron.zerobubble.training.checkpoint.save import save_checkpoint
from megatron.zerobubble.training.step import TrainingState
from tests.support.ranks import RankPool
from tests.support.training_states import train, training_state_of

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


def failing_saves(rank: int, folder: str) -> str:
    """The error of a save while the disk of rank 2 is full."""
    with training_state_of(rank, [*V4, "--save", folder]) as training_state:
        train(training_state, first=1, last=1)
        _save(training_state, 1)
        with pytest.raises(CheckpointError) as caught, full_disk() if rank == 2 else nullcontext():
            _save(training_state, 2)
        _save(training_state, 3)  # and the next one is not disturbed
    return str(caught.value)


def _save(training_state: TrainingState, iteration: int) -> None:
    save_checkpoint(training_state, run="a", iteration=iteration, consumed_samples=8 * iteration)


def test_a_write_that_fails_is_raised_on_every_rank_with_its_reason(four_ranks: RankPool, tmp_path: Path) -> None:
    for text in four_ranks.run(failing_saves, str(tmp_path)):
        assert "iter_0000002 cannot be written: rank 2: " in text
        assert "File too large" in text
    assert tracked_iteration(tmp_path) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"latest_checkpointed_iteration.txt", "iter_0000001", "iter_0000003"}


def fill(rank: int, folder: str, whose: int) -> str:
    """The error of a rank whose disk is full after torch's writer has begun a file."""
    with training_state_of(rank, [*V4, "--save", folder]) as training_state:
        train(training_state, first=1, last=1)
        with pytest.raises(CheckpointError) as caught, written_until_full() if rank == whose else nullcontext():
            _save(training_state, 1)
    return str(caught.value)


@contextmanager
def written_until_full() -> Iterator[None]:
    """As a full disk: torch's writer gets an error from the file, and raises another one about its own position."""

    class Full(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def create_stream(self: object, path: Path, mode: str) -> Iterator[io.FileIO]:
        with Full(path, "w") as stream:
            yield stream

    with mock.patch.object(FileSystem, "create_stream", create_stream):
        yield


def test_a_full_disk_is_named_on_every_rank(four_ranks: RankPool, tmp_path: Path) -> None:
    for text in four_ranks.run(fill, str(tmp_path), 1):
        assert text.endswith("iter_0000001 cannot be written: rank 1: [Errno 28] No space left on device")


def test_an_error_that_a_full_disk_led_to_names_it() -> None:
    def failed(number: int) -> Exception:
        try:
            try:
                raise OSError(number, os.strerror(number))
            finally:
                raise RuntimeError("unexpected pos 704 vs 598")
        except RuntimeError as error:
            return error

    assert disk_error(failed(errno.ENOSPC)).strerror == "No space left on device"  # type: ignore[union-attr]
    assert disk_error(failed(errno.ENOENT)) is None
