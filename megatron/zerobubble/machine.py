"""What this machine lets the process use, and which processes run on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessState", "children_of", "process_state", "usable_cores"]


class ProcessState(NamedTuple):
    """A process in Linux's table."""

    start: str
    """When it started, in clock ticks since the machine did: with the id it names one process, as ids are used again."""
    is_zombie: bool
    """Whether it has ended, and its parent has not yet asked for the exit code."""
    is_stopped: bool
    """Whether a signal or a debugger has stopped it."""
    parent: int
    """Id of its parent."""


def process_state(pid: int) -> ProcessState | None:
    """The process with this id; None if there is none, or on a system without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # its name may be any bytes
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return ProcessState(start=fields[19], is_zombie=fields[0] == "Z", is_stopped=fields[0] in ("T", "t"), parent=int(fields[1]))


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that have not been waited for; none on a system without /proc."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    states = {each: process_state(each) for each in pids}
    return [each for each, state in states.items() if state is not None and state.parent == pid]


def usable_cores() -> int:
    """CPU cores that this process may use, at least 1: those of its affinity where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
