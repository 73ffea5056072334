"""What this machine lets the process use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """CPU cores that this process may use, at least 1: those of its affinity where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
