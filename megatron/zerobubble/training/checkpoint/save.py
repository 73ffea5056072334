"""Saving checkpoints.

A save has three parts. All ranks plan what each of them writes; each rank writes its file and computes its checksums; and when
all have written, rank 0 writes the metadata and the manifest, and makes the checkpoint the latest (see `directory`). A failed
write ends the run, with the reason; the checkpoint before it remains the latest.

Planning and format are megatron-core's. Its writer starts a process that outlives a rank that is killed, and keeps the rank's
standard output open; so files are written by torch's.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.files import disk_error
from megatron.zerobubble.training.checkpoint.contents import state_to_save, without_optimizer
from megatron.zerobubble.training.checkpoint.directory import iteration_directory, prepare, publish, writing_directory
from megatron.zerobubble.training.checkpoint.manifest import FileRecord, Manifest, damaged_names, first_damage, record_of
from megatron.zerobubble.training.checkpoint.shared import SHARE, gathered, run_on_rank_0, wait_for_files
from megatron.zerobubble.training.step import TrainingState, parameters_in_place

__all__ = ["SaveStrategy", "save_checkpoint"]

_log = logging.getLogger(__name__)


def save_checkpoint(training_state: TrainingState, *, run: str, iteration: int, consumed_samples: int) -> None:
    """Write a checkpoint into the --save directory, and make it the latest. All ranks must call this.

    Args:
        training_state: model chunks, optimizer and scheduler to save.
        run: id of the job, the same on all ranks.
        iteration: iterations done. The optimizer step of the last one must be validated.
        consumed_samples: samples consumed so far by all ranks together.

    Raises:
        CheckpointError: it cannot be written; on all ranks, after each has removed what its host has of it.
    """
    folder = training_state.settings.checkpoint.save
    assert folder is not None
    run_on_rank_0(lambda: _prepare(folder, iteration))
    try:
        with training_state.on_host(), parameters_in_place(training_state):
            state = state_to_save(training_state, iteration=iteration, consumed_samples=consumed_samples, run=run)
            own = _write(state, folder, iteration)
        records = {name: record for each in gathered(own) for name, record in each.items()}
        run_on_rank_0(lambda: _publish(folder, Manifest(run=run, iteration=iteration, files=records)))
    except CheckpointError:
        shutil.rmtree(writing_directory(folder, iteration), ignore_errors=True)
        torch.distributed.barrier()  # the next save finds no rank that still removes files
        raise
    _log.info("saved %s", iteration_directory(folder, iteration))


class SaveStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's format `torch_dist`, written by torch, in the thread that calls it. Use one instance per save."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.records: dict[str, FileRecord] = {}
        """Size and checksums of the file that this rank wrote, by name."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of the state. All ranks must call it.

        Args:
            sharded_state_dict: the state to save.
            checkpoint_dir: the directory of the checkpoint.
        """
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        writer = _Writer(checkpoint_dir, per_thread_copy_ahead=0)
        save(mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner)
        self.records = writer.records


class _Writer(FileSystemWriter):
    """Writes one file per rank, and computes its checksums while it is in the page cache."""

    records: dict[str, FileRecord]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write what this rank has."""
        with _naming_disk():
            written = super().write_data(plan, planner)
            written.wait()
        names = {each.storage_data.relative_path for each in written.value()}
        self.records = {name: record_of(Path(self.path) / name) for name in names}
        return written


def _write(state: dict[str, Any], folder: str, iteration: int) -> dict[str, FileRecord]:
    """Write the state; the record of each file that this rank wrote."""
    strategy = SaveStrategy()
    try:
        with _naming_disk():  # what rank 0 writes by itself
            dist_checkpointing.save(
                state,
                str(writing_directory(folder, iteration)),
                strategy,
                preprocess_common_before_consistancy_check=without_optimizer,
            )
    except CheckpointException as error:  # torch's, a BaseException: raised on all ranks, with the reason on rank 0
        run_on_rank_0(partial(_fail, folder, iteration, error))
        raise
    return strategy.records


@contextmanager
def _naming_disk() -> Iterator[None]:
    """Raise the OSError of a full disk in place of an error that torch's writer raises in consequence of it."""
    try:
        yield
    except RuntimeError as error:
        reason = disk_error(error)
        if reason is None:
            raise
        raise reason from error


def _fail(folder: str, iteration: int, failed: CheckpointException) -> NoReturn:
    reasons = "; ".join(f"rank {rank}: {error}" for rank, (error, _) in sorted(failed.failures.items()))
    raise CheckpointError(f"{iteration_directory(folder, iteration)} cannot be written: {reasons}")


def _prepare(folder: str, iteration: int) -> None:
    with _refusing(folder, iteration):
        prepare(folder, iteration)


def _publish(folder: str, written: Manifest) -> None:
    """Complete the manifest by what rank 0 wrote, write it, and make the checkpoint the latest."""
    with _refusing(folder, written.iteration):
        directory = writing_directory(folder, written.iteration)
        files = dict(written.files)
        files |= {path.name: record_of(path) for path in directory.iterdir() if path.is_file() and path.name not in files}
        manifest = Manifest(run=written.run, iteration=written.iteration, files=files)
        if amiss := wait_for_files(lambda: damaged_names(directory, manifest)):
            final = iteration_directory(folder, written.iteration)
            raise CheckpointError(f"{final} cannot be written: rank 0 sees other files: {first_damage(amiss)}; {SHARE}")
        manifest.write(directory)
        publish(folder, written.iteration)


@contextmanager
def _refusing(folder: str, iteration: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{iteration_directory(folder, iteration)} cannot be written: {error}") from error
