"""Which pieces of documents share a row: next-fit, which keeps their order.

A piece goes into the row that is being filled, or begins a new one where it does not fit any more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["next_fit"]


def next_fit(lengths: np.ndarray[Any, Any], capacity: int) -> np.ndarray[Any, Any]:
    """Cut a sequence of pieces into rows.

    Args:
        lengths: [n] tokens of each piece, above 0 and at most `capacity`, in order.
        capacity: tokens of a row, at most.

    Returns:
        [r + 1] int64: the first piece of each row, and n.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts, first, used = [0], 0, 0
    while first < len(ends):
        first = int(np.searchsorted(ends, used + capacity, side="right"))
        used = int(ends[first - 1])
        starts.append(first)
    return np.asarray(starts, dtype=np.int64)
