"""Writes this rank's part of a distributed checkpoint, and leaves no process behind.

megatron-core's own writer starts a manager process at the first save, which runs until the rank exits normally. If the rank is
killed, the manager process keeps running with the rank's standard output open, and a reader of that output blocks forever. This
writer is passed to megatron-core as the `sharded_strategy` of a save, its extension point. Planning, file format and metadata are
megatron-core's. What differs is who writes:

- synchronous saves: threads of the rank itself, one per file;
- asynchronous saves: one forked process, started by `AsyncCallsQueue`. It polls its parent and exits shortly after it.

Who writes a file computes its checksums, too, right after, when the file is still in the page cache. The write results and the
checksums come back in an unnamed temporary file that both processes have open. If the writing process died, the file is empty.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync,
    _split_by_size_and_type,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import WriteItemType

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.manifest import FileRecord, record_of

__all__ = ["SaveStrategy"]

_FILES_PER_RANK = 2
"""The default of megatron-core: two, written by two threads in parallel."""

_POLL_INTERVAL_S = 0.2
"""Seconds between two checks of a writing process whether its rank is still alive."""


class SaveStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's format `torch_dist`, written without long-lived processes. Use one instance per save."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=_FILES_PER_RANK)
        self._writer: _Writer | None = None

    @property
    def records(self) -> dict[str, FileRecord]:
        """Size and checksums of each file that this rank wrote, by name; complete when the save is finalized."""
        return {} if self._writer is None else self._writer.records

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore") -> AsyncRequest:
        """Plan the save and collect what this rank writes. All ranks must call it.

        Args:
            sharded_state_dict: the state to save.
            checkpoint_dir: the directory of the checkpoint.
            async_strategy: passed by megatron-core 0.19; ignored, as this class is the strategy.

        Returns:
            A request that writes when it runs; nothing is written before.
        """
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self._writer = writer = _Writer(checkpoint_dir, thread_count=self.thread_count)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(state, False), writer, planner=planner)
        write, preload, arguments = writer.get_save_function_and_args()
        finalize = partial(save_state_dict_async_finalize, *planned)
        return AsyncRequest(write, arguments, [finalize], preload_fn=preload)


class _Writer(FileSystemWriterAsync):
    """Writes the files of one rank in one save."""

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Assign the data of this rank to files. Tensors on a GPU are copied to the host later, when the request is scheduled."""
        self.write_buckets = []
        self.records: dict[str, FileRecord] = {}
        for number, items in enumerate(_split_by_size_and_type(self.thread_count, plan.items)):
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            data = [(item, planner.resolve_data(item)) for item in items]
            objects = [(item, value) for item, value in data if item.type == WriteItemType.BYTE_IO]
            tensors = [(item, _without_base(value)) for item, value in data if item.type != WriteItemType.BYTE_IO]
            if data:
                self.write_buckets.append((os.path.join(self.checkpoint_dir, name), name, (objects, tensors)))
        self._answer: IO[bytes] | None = tempfile.TemporaryFile() if self.write_buckets else None  # noqa: SIM115

    def get_save_function_and_args(self) -> tuple[Any, Any, list[Any]]:
        """(write function, function that copies tensors to the host, arguments of the write function)."""
        if not self.write_buckets:
            return None, None, []
        rank = torch.distributed.get_rank()
        write = partial(_write, [self.transforms], os.getpid())
        return write, partial(self.preload_tensors, self.write_buckets, True), [rank, self.write_buckets, self._answer]

    def retrieve_write_results(self) -> Any:
        """The write results of this rank, or a wrapped CheckpointError."""
        if self._answer is None:
            return []
        with self._answer as answer:
            answer.seek(0)
            try:
                written, self.records = pickle.load(answer)  # safe: written by our own process, in an unnamed file
            except EOFError:
                written = "the process that wrote ended before it was done (killed, or out of memory)"
        return _wrap_exception(CheckpointError(written)) if isinstance(written, str) else written


def _without_base(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor that is a view of a larger storage, which would all be written; other tensors as they are."""
    tensor = tensor.detach()
    is_view = tensor.device.type == "cpu" and tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
    return tensor.clone() if is_view else tensor


def _write(transforms: list[Any], rank_pid: int, rank: int, buckets: list[Any], answer: IO[bytes]) -> None:
    """Write and fsync all files, then pickle (the write results, or the first error; the record of each file) into `answer`.

    Runs in the rank's process, or in a fork of it.
    """
    if os.getpid() != rank_pid:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the rank decides what to do
        threading.Thread(target=_exit_with, args=(rank_pid,), daemon=True).start()
    results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    counts: queue.Queue[int] = queue.Queue()
    with ThreadPoolExecutor(len(buckets)) as pool:
        writing = []
        for number, bucket in enumerate(buckets):
            counts.put(number)
            write = FileSystemWriterAsync.write_preloaded_data
            writing.append(pool.submit(write, transforms, number, bucket, results, counts, use_fsync=True))
    for each in writing:
        each.result()
    written = [results.get()[1] for _ in buckets]
    failed = [each for each in written if isinstance(each, Exception)]
    entries = [entry for each in written if not isinstance(each, Exception) for entry in each]
    pickle.dump((_reason(failed[0]) if failed else entries, {} if failed else _records(buckets)), answer)
    answer.flush()


def _records(buckets: list[Any]) -> dict[str, FileRecord]:
    with ThreadPoolExecutor(len(buckets)) as pool:
        return dict(zip((name for _, name, _ in buckets), pool.map(lambda each: record_of(Path(each[0])), buckets), strict=True))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _exit_with(rank_pid: int) -> None:
    """Exit when the process `rank_pid` is no longer the parent."""
    while os.getppid() == rank_pid:
        time.sleep(_POLL_INTERVAL_S)
    os._exit(1)
