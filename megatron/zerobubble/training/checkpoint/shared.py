"""What ranks of several hosts do together: rank 0 for all, and all to see that they have the same files.

A host with a directory of its own under the same path writes its part of a checkpoint where no other host finds it. So rank 0
writes a file, and every rank looks for it. Clients of a network file system may see a new file late, because they cache which
files are missing; what is not there is looked for again for some seconds.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.zerobubble.errors import CheckpointError

__all__ = ["SHARE", "check_all_hosts_see", "check_save_directory", "gathered", "run_on_rank_0", "wait_for_files", "why_unseen"]

SHARE = "give a directory that all hosts share"
"""The remedy, for messages."""

_PATIENCE_S = 5.0
_POLL_INTERVAL_S = 0.2
_NUM_NAMED = 3

T = TypeVar("T")


def gathered(own: T) -> list[T]:
    """What each rank passes, on every rank; it must be picklable. All ranks must call this."""
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, own)
    return everywhere


def run_on_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0; all ranks must call this.

    Args:
        action: its result must be picklable.

    Returns:
        Its result, on every rank.

    Raises:
        CheckpointError: as `action` raised it on rank 0, on every rank.
    """
    outcome: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [action(), None]
        except CheckpointError as error:
            outcome = [None, str(error)]
    torch.distributed.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise CheckpointError(failure)
    return result


def check_save_directory(folder: str | None) -> None:
    """Check that every rank sees the --save directory, which rank 0 makes. All ranks must call this, before the model is built.

    Args:
        folder: the directory; None: nothing is saved.

    Raises:
        CheckpointError: rank 0 cannot write into it, or a host does not see what rank 0 wrote; the same on all ranks.
    """
    if folder is None:
        return
    name = run_on_rank_0(lambda: _written(Path(folder)))
    try:
        _refuse_unseen(Path(folder, name), f"--save {folder}")
    finally:
        if torch.distributed.get_rank() == 0:
            Path(folder, name).unlink(missing_ok=True)


def check_all_hosts_see(path: Path, what: str) -> None:
    """Check that every rank sees a file or directory that rank 0 sees. All ranks must call this.

    Args:
        path: the file; if rank 0 does not see it either, nothing is checked.
        what: names it in the error.

    Raises:
        CheckpointError: a host does not see it; the same on all ranks.
    """
    if run_on_rank_0(lambda: os.path.exists(path)):  # unlike Path.exists never raises
        _refuse_unseen(path, what)


def wait_for_files(
    amiss: Callable[[], T], *, now: Callable[[], float] = time.monotonic, pause: Callable[[float], object] = time.sleep
) -> T:
    """Look again, for up to 5 seconds, until nothing is amiss.

    Args:
        amiss: returns what is missing; nothing is if that is empty or None.
        now: the time, in seconds.
        pause: waits for some seconds.

    Returns:
        What `amiss` returned last.
    """
    deadline = now() + _PATIENCE_S
    while (found := amiss()) and now() < deadline:
        pause(_POLL_INTERVAL_S)
    return found


def _written(folder: Path) -> str:
    """Make the directory and a file in it; return the name of the file, which no host has looked for before."""
    name = f".shared-{uuid.uuid4().hex[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError as error:
        raise CheckpointError(f"--save {folder} cannot be written: {error.strerror}") from error
    return name


def _refuse_unseen(path: Path, what: str) -> None:
    own = (socket.gethostname(), wait_for_files(lambda: why_unseen(path)))
    everywhere = gathered(own)
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (host, reason) in enumerate(everywhere):
        if reason is not None:
            ranks.setdefault((host, reason), []).append(rank)
    if ranks:
        named = [f"{host} ({_ranks(numbers)}): {reason}" for (host, reason), numbers in ranks.items()]
        more = f"; and {len(named) - _NUM_NAMED} more hosts" if len(named) > _NUM_NAMED else ""
        raise CheckpointError(
            f"{what} is not the same directory on all hosts; rank 0 is on {everywhere[0][0]} and sees it, these do not: "
            f"{'; '.join(named[:_NUM_NAMED])}{more}; {SHARE}"
        )


def why_unseen(path: Path) -> str | None:
    """Why this rank does not see a file or directory, after it has asked the server of a network file system; None: it does."""
    for folder in (path.parent.parent, path.parent):
        with suppress(OSError):  # reported below
            os.close(os.open(folder, os.O_RDONLY))  # a client of NFS asks the server about a directory that is opened
    try:
        path.stat()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"rank {numbers[0]} and {len(numbers) - 1} more"
