"""Python's garbage collection at chosen points, the same on all ranks (--manual-gc).

Python collects whenever enough objects were made, on each rank at another moment, and for tens of milliseconds in a large
process. In a pipeline every rank waits for the one that is collecting, so the pauses of all ranks add up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collecting_by_hand"]


@contextmanager
def collecting_by_hand(*, is_manual: bool) -> Iterator[None]:
    """Wrap training: all garbage is collected at the start, and then only what the loop collects itself.

    What is there at the start, such as the model, stays: later collections do not look at it.

    Args:
        is_manual: --manual-gc; otherwise nothing changes.
    """
    if is_manual:
        gc.disable()
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if is_manual:
            gc.unfreeze()
            gc.enable()
