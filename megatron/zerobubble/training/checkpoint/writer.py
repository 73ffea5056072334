"""Writes this rank's part of a distributed checkpoint, and leaves no process behind.

megatron-core's own writer starts a manager process at the first save, which stays until the rank ends in good order. A rank that
is killed cannot end it: it lives on with the rank's standard output open, and whoever reads that waits for ever. This writer is
given to megatron-core as the `sharded_strategy` of a save, which is its extension point. Planning, file format and metadata stay
megatron-core's. What differs is who writes:

- at once: threads of the rank itself, one a file;
- in the background: one forked process, as `AsyncCallsQueue` starts it. It looks after its parent and ends within a moment of it.

What was written where comes back in a file without a name that both processes have open. A process that ended early left it
empty, which is how its death is noticed.
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
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
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

__all__ = ["SaveStrategy"]

_FILES_PER_RANK = 2
"""As megatron-core writes: two, so that two threads write at the same time."""

_LOOKS_EVERY_S = 0.2
"""How often a writing process looks whether its rank is still there."""


class SaveStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's format `torch_dist`, written without lasting processes. Use one instance for one save."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=_FILES_PER_RANK)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> AsyncRequest:
        """Plan the save and gather what this rank writes. All ranks must call it; nothing is written before the request runs."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = _Writer(checkpoint_dir, thread_count=self.thread_count)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(state, False), writer, planner=planner)
        return self._get_save_and_finalize_callbacks(writer, planned)


class _Writer(FileSystemWriterAsync):
    """What one rank writes in one save."""

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Resolve what is written, file by file. Tensors on a GPU are copied to the host later, when the request is scheduled."""
        self.write_buckets = []
        for number, items in enumerate(_split_by_size_and_type(self.thread_count, plan.items)):
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            data = [(item, planner.resolve_data(item)) for item in items]
            objects = [(item, value) for item, value in data if item.type == WriteItemType.BYTE_IO]
            tensors = [(item, _alone(value)) for item, value in data if item.type != WriteItemType.BYTE_IO]
            if data:
                self.write_buckets.append((os.path.join(self.checkpoint_dir, name), name, (objects, tensors)))
        self._answer: IO[bytes] | None = tempfile.TemporaryFile() if self.write_buckets else None  # noqa: SIM115

    def get_save_function_and_args(self) -> tuple[Any, Any, list[Any]]:
        """(what writes, what brings its tensors to the host, its arguments), in the order megatron-core calls them with."""
        if not self.write_buckets:
            return None, None, []
        rank = torch.distributed.get_rank()
        write = partial(_write, [self.transforms], os.getpid())
        return write, partial(self.preload_tensors, self.write_buckets, True), [rank, self.write_buckets, self._answer]

    def retrieve_write_results(self) -> Any:
        """Where everything this rank wrote lies, or why it does not."""
        if self._answer is None:
            return []
        with self._answer as answer:
            answer.seek(0)
            try:
                written = pickle.load(answer)  # what our own process wrote; the file has no name
            except EOFError:
                written = "the process that wrote ended before it was done (killed, or out of memory)"
        return _wrap_exception(CheckpointError(written)) if isinstance(written, str) else written


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of the memory it is a view of, which would be written with it."""
    tensor = tensor.detach()
    is_view = tensor.device.type == "cpu" and tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
    return tensor.clone() if is_view else tensor


def _write(transforms: list[Any], rank_pid: int, rank: int, buckets: list[Any], answer: IO[bytes]) -> None:
    """Write all files, each with its fsync, and then into `answer` where everything lies, or the first reason why it does not.

    Runs in the rank itself, or in a fork of it.
    """
    if os.getpid() != rank_pid:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; what becomes of the write the rank decides
        threading.Thread(target=_end_with, args=(rank_pid,), daemon=True).start()
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
    pickle.dump(_reason(failed[0]) if failed else [entry for entries in written for entry in entries], answer)
    answer.flush()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _end_with(rank_pid: int) -> None:
    while os.getppid() == rank_pid:
        time.sleep(_LOOKS_EVERY_S)
    os._exit(1)
