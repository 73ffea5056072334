"""Keeping freed memory in the process, for tensors in host memory.

A pipeline frees and allocates the same tens of megabytes in every pass. CUDA's allocator caches freed memory. glibc returns it to
the system, by trimming the top of its heap or unmapping blocks of their own; the system zeroes each page when it is touched
again. ADR 8 has the number of page faults, and their cost.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt(3)`, as numbered in glibc's malloc.h."""

_NEVER = 2**31 - 1
"""Bytes that may be free at the top of the heap before it is trimmed: the largest C int."""

_LARGEST_ON_HEAP = 32 * 2**20
"""Bytes from which a block gets a mapping of its own; glibc accepts no more than this (HEAP_MAX_SIZE / 2)."""


def keep_freed_memory() -> bool:
    """Make the C library keep the memory that this process frees, in blocks up to 32 MiB.

    It cannot be undone, because the previous settings cannot be read.

    Returns:
        Whether the C library has these settings; nothing is changed if it does not (musl, macOS, Windows).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
