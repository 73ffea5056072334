"""Keeping freed memory in the process, where tensors are in host memory.

A pipeline frees and allocates the same tens of megabytes with every pass. CUDA's allocator caches what is freed. glibc gives it
back to the system, as the top of its heap or as blocks mapped by themselves; each page is zeroed by the system when it is touched
again. ADR 8 says how many pages that are, and what the system's time for them was.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's names in malloc.h, of parameters that `mallopt(3)` explains."""

_NEVER = 2**31 - 1
"""Bytes that may lie unused at the top of the heap; a C int."""

_LARGEST_ON_HEAP = 32 * 2**20
"""Bytes from which a block is mapped by itself; glibc takes no more (HEAP_MAX_SIZE / 2)."""


def keep_freed_memory() -> bool:
    """Let the C library keep what this process frees, up to blocks of 32 MiB. For the life of the process: it cannot be asked
    what it did before.

    Returns:
        Whether the C library has such a choice; nothing is changed where it does not (musl, macOS, Windows).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
