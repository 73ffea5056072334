"""The ranks that the launcher of this one has started beside it, according to this machine and not to the job's store.

One that is stopped has to be ended by another one, and torchrun shows what is in its error file. Both are found from what this
process was started with, because whoever reaches the store could name any process and any file.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from megatron.zerobubble.job.error_file import write_error_file
from megatron.zerobubble.machine import children_of, process_state

__all__ = ["error_file_beside", "kill_if_stopped", "write_beside"]

_BEFORE_OWN_S = 10
"""Seconds by which a file beside is dated back: its rank failed before those that write about it, which are not all at once."""
_OF_ONE_JOB = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def error_file_beside(own: str | None, *, own_rank: int, rank: int) -> str | None:
    """The error file of another rank that this machine's torchrun has started; None if it has started no such rank.

    torchrun numbers the ranks of a machine in a row, and makes a folder for each of them, named after its local rank.

    Args:
        own: the error file of this rank.
        own_rank: this rank.
        rank: the other one.
    """
    path = Path(own or "")
    if path.name != "error.json" or not path.parent.name.isdecimal():
        return None
    folder = path.parent.with_name(str(int(path.parent.name) + rank - own_rank))
    return str(folder / path.name) if folder.is_dir() else None


def write_beside(own: str | None, *, own_rank: int, rank: int, line: str) -> None:
    """Write the reason of another rank of this machine into its error file, unless one is there.

    With an earlier time than that in any rank's own file: torchrun shows the earliest as the root cause.

    Args:
        own: the error file of this rank.
        own_rank: this rank.
        rank: the other one.
        line: the reason.
    """
    beside = error_file_beside(own, own_rank=own_rank, rank=rank)
    if beside is not None and not Path(beside).exists():
        write_error_file(beside, line, seconds_ago=_BEFORE_OWN_S)


def kill_if_stopped(rank: int) -> bool:
    """Kill a rank that this one's launcher has started on this machine, if it is stopped: it would not take SIGTERM.

    And what that rank has started, such as its data loaders.

    Returns:
        Whether there was one. False on a system without /proc.
    """
    own, parent = _environment("self"), os.getppid()
    for name in os.listdir("/proc") if own else ():
        state = process_state(int(name)) if name.isdecimal() else None
        if state is not None and state.parent == parent and state.is_stopped:
            others = _environment(name)
            if others.get("RANK") == str(rank) and all(others.get(each) == own.get(each) for each in _OF_ONE_JOB):
                for each in (*children_of(int(name)), int(name)):
                    with suppress(OSError):
                        os.kill(each, signal.SIGKILL)
                return True
    return False


def _environment(process: str) -> dict[str, str]:
    """The variables with which a process was started; none if it is gone, or another user's."""
    found = ""
    with suppress(OSError):
        found = Path(f"/proc/{process}/environ").read_text(encoding="utf-8", errors="replace")
    return {name: value for name, _, value in (each.partition("=") for each in found.split("\0"))}
