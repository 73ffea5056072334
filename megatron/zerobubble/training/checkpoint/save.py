"""Saving checkpoints, synchronously or in the background (--async-save).

A save has three parts. All ranks plan what each of them writes; each rank writes its files and computes their checksums; and
when all have written, rank 0 writes the metadata and the manifest, and makes the checkpoint the latest (see `directory`). With
--async-save a forked process does the second part, from a copy in host memory, and the third follows at the end of an iteration
that all ranks agree on without a barrier: each rank counts itself in the job's store once it has written, the first rank that
finds the count complete stores the number of the next iteration, and every rank reads it at the end of each iteration.
`resilience.early_exit` explains why all ranks read it in time.

At most one save is in progress. The next save, and the end of the run, wait for it. A failed write ends the run, with the reason,
when the save is finished; the checkpoint before it remains the latest.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.training.checkpoint.contents import state_to_save, without_optimizer
from megatron.zerobubble.training.checkpoint.directory import iteration_directory, prepare, publish, writing_directory
from megatron.zerobubble.training.checkpoint.manifest import FileRecord, Manifest, damaged_names, first_damage, record_of
from megatron.zerobubble.training.checkpoint.rank_0 import run_on_rank_0
from megatron.zerobubble.training.checkpoint.shared import SHARE, wait_for_files
from megatron.zerobubble.training.checkpoint.writer import SaveStrategy
from megatron.zerobubble.training.step import TrainingState, parameters_in_place

__all__ = ["CheckpointSaver"]

_log = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves the checkpoints of a run with --save. Every rank needs one, and all must call the same methods.

    Args:
        training_state: model chunks, optimizer and scheduler to save.
        store: the job's store.
        run: id of the job, the same on all ranks; None: a new one.
    """

    def __init__(self, training_state: TrainingState, store: Store, *, run: str | None = None) -> None:
        flags = training_state.settings.checkpoint
        assert flags.save is not None
        self._training_state = training_state
        self._store = store
        self._folder = flags.save
        self._is_async = flags.async_save
        self._run = run or store.compare_set("save/run", "", uuid.uuid4().hex[:16]).decode()
        """Id of the job in the checkpoints that it saves."""
        self._calls = AsyncCallsQueue()
        self._strategy = SaveStrategy()
        self._in_progress: int | None = None
        """Iteration of the checkpoint that is being written in the background."""
        self._has_reported = False
        self._num_saves = 0

    def save(self, *, iteration: int, consumed_samples: int) -> None:
        """Write a checkpoint, or with --async-save start writing it. All ranks must call this.

        Args:
            iteration: iterations done. The optimizer step of the last one must be validated.
            consumed_samples: samples consumed so far by all ranks together.

        Raises:
            CheckpointError: it, or a previous one in progress, cannot be written.
        """
        self.finish()
        run_on_rank_0(lambda: self._prepare(iteration))
        self._num_saves += 1
        with self._training_state.on_host(), parameters_in_place(self._training_state):
            request = self._request(iteration, consumed_samples)
            if not self._is_async:
                self._conclude(iteration, request.execute_sync)
                return
            self._calls.schedule_async_request(request)
        self._in_progress, self._has_reported = iteration, False
        _log.info("saving %s in the background", iteration_directory(self._folder, iteration))

    @property
    def is_in_progress(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._in_progress is not None

    def poll(self, iteration: int) -> None:
        """Finish the save in progress if all ranks have written. Every rank must call this at the end of every iteration.

        Args:
            iteration: the iteration that ended.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._in_progress is None:
            return
        written, agreed = f"save/{self._num_saves}/written", f"save/{self._num_saves}/agreed"
        caller = self._calls.async_calls[0].async_caller
        if not self._has_reported and caller.is_current_async_call_done(blocking=False, no_dist=True):
            self._store.add(written, 1)
            self._has_reported = True
        if self._store.add(written, 0) == torch.distributed.get_world_size():
            self._store.compare_set(agreed, "", str(iteration + 1))
        if self._store.check([agreed]) and iteration >= int(self._store.get(agreed)):
            self.finish()

    def finish(self) -> None:
        """Wait for the save in progress. All ranks must call this.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._in_progress is not None:
            iteration, self._in_progress = self._in_progress, None
            self._conclude(iteration, lambda: self._calls.maybe_finalize_async_calls(blocking=True))

    def _prepare(self, iteration: int) -> None:
        with self._refusing(iteration):
            prepare(self._folder, iteration)

    def _request(self, iteration: int, consumed_samples: int) -> Any:
        self._strategy = SaveStrategy()
        return dist_checkpointing.save(
            state_to_save(self._training_state, iteration=iteration, consumed_samples=consumed_samples, run=self._run),
            str(writing_directory(self._folder, iteration)),
            self._strategy,
            async_sharded_save=True,
            preprocess_common_before_consistancy_check=without_optimizer,
        )

    def _conclude(self, iteration: int, write: Callable[[], object]) -> None:
        """Complete the write by calling `write`, and make the checkpoint the latest.

        Raises:
            CheckpointError: it failed; on all ranks, after each has removed what its host has of it.
        """
        try:
            self._complete(iteration, write)
        except CheckpointError:
            shutil.rmtree(writing_directory(self._folder, iteration), ignore_errors=True)
            torch.distributed.barrier()  # the next save finds no rank that still removes files
            raise
        _log.info("saved %s", iteration_directory(self._folder, iteration))

    def _complete(self, iteration: int, write: Callable[[], object]) -> None:
        try:
            write()
        except CheckpointException as error:  # torch's, a BaseException: raised on all ranks, with the reason on rank 0
            run_on_rank_0(partial(self._fail, iteration, error))
            raise
        everywhere: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everywhere, self._strategy.records)
        run_on_rank_0(lambda: self._publish(iteration, {name: record for each in everywhere for name, record in each.items()}))

    def _fail(self, iteration: int, failed: CheckpointException) -> NoReturn:
        reasons = "; ".join(f"rank {rank}: {error}" for rank, (error, _) in sorted(failed.failures.items()))
        raise CheckpointError(f"{iteration_directory(self._folder, iteration)} cannot be written: {reasons}")

    def _publish(self, iteration: int, records: dict[str, FileRecord]) -> None:
        """Complete the manifest by what rank 0 wrote, write it, and make the checkpoint the latest."""
        with self._refusing(iteration):
            directory = writing_directory(self._folder, iteration)
            own = {path.name: record_of(path) for path in directory.iterdir() if path.is_file() and path.name not in records}
            manifest = Manifest(run=self._run, iteration=iteration, files=records | own)
            if amiss := wait_for_files(lambda: damaged_names(directory, manifest)):
                final = iteration_directory(self._folder, iteration)
                raise CheckpointError(f"{final} cannot be written: rank 0 sees other files: {first_damage(amiss)}; {SHARE}")
            manifest.write(directory)
            publish(self._folder, iteration)

    @contextmanager
    def _refusing(self, iteration: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{iteration_directory(self._folder, iteration)} cannot be written: {error}") from error
