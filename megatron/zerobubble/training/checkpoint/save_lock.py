"""One job at a time writes into a --save directory.

Two jobs with one directory remove each other's unfinished checkpoints, or one replaces those of the other. So rank 0 holds a lock
on a file in it, from before the model is built until the job ends. The system releases it when the process ends, however that
happens, and file systems that several hosts share pass it on. The file says who holds the lock. Where a file system has no locks,
that is logged.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.messages import shown
from megatron.zerobubble.training.checkpoint.shared import run_on_rank_0, wait_for_files

__all__ = ["LOCK", "hold_save_directory"]

_log = logging.getLogger(__name__)

LOCK = ".zerobubble.lock"
"""Name of the file."""
_HELD = (BlockingIOError, PermissionError)
"""What a lock that another process holds raises, by file system."""


@contextmanager
def hold_save_directory(folder: str | None, *, run: str) -> Iterator[None]:
    """Hold the lock of the --save directory inside. All ranks must enter it; rank 0 holds the lock.

    Args:
        folder: the directory, which exists; None: nothing is saved.
        run: id of the job, the same in all of its attempts. An earlier attempt that still lives is not in the way.

    Raises:
        CheckpointError: another job holds it; the same line on all ranks.
    """
    held: list[int] = []
    if folder is not None:
        run_on_rank_0(lambda: held.extend(_taken(Path(folder), run)))
    try:
        yield
    finally:
        for descriptor in held:
            with suppress(OSError):  # the directory may be gone
                Path(str(folder), LOCK).unlink()
            os.close(descriptor)


def _taken(folder: Path, run: str) -> list[int]:
    """The descriptor that holds the lock; empty without locks, or where an earlier attempt of this job holds it."""
    found: list[int | dict[str, Any]] = []

    def is_in_the_way() -> bool:
        found[:] = [_take(folder / LOCK)]
        return isinstance(found[0], dict) and found[0].get("run") != run

    try:
        wait_for_files(is_in_the_way)  # a job that has just been ended may still hold it
    except OSError as error:
        _log.warning("--save %s is not locked against other jobs: %s", folder, error.strerror or error)
        return []
    (own,) = found
    if isinstance(own, int):
        os.truncate(own, 0)
        os.pwrite(own, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "run": run}).encode(), 0)
        return [own]
    if own.get("run") == run:
        _log.warning("--save %s: an earlier attempt of this job still holds its lock", folder)
        return []
    who = f"process {shown(own.get('pid', '?'))} on {shown(own.get('host', '?'))} (run {shown(own.get('run', '?'))})"
    raise CheckpointError(f"--save {folder} is in use: {who} writes its checkpoints there; give each job a directory of its own")


def _take(file: Path) -> int | dict[str, Any]:
    """A descriptor that holds the lock of a file, or what the one who holds it wrote there. Raises OSError without locks."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # else it was removed, by the one who held it, after it was opened here
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                    return descriptor
            os.close(descriptor)
        except _HELD:
            text = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            with suppress(ValueError):
                return dict(json.loads(text))
            return {}
        except OSError:
            os.close(descriptor)
            raise
