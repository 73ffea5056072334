"""Python's garbage collection at chosen points, the same on all ranks (--manual-gc).

Python collects whenever enough objects were made, on each rank at another moment, and for tens of milliseconds in a large
process. In a pipeline every rank waits for the one that is collecting, so the pauses of all ranks add up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from megatron.zerobubble.training.config.run import RunConfig

__all__ = ["GarbageCollection"]


class GarbageCollection:
    """A context manager around training. Inside, with --manual-gc, garbage is collected only when a method here does it.

    Args:
        run: the flags.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run = run

    def __enter__(self) -> GarbageCollection:
        if self._run.manual_gc:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._run.manual_gc:
            gc.enable()

    def after_iteration(self, iteration: int) -> None:
        """Collect after the iterations of --manual-gc-interval."""
        interval = self._run.manual_gc_interval
        if self._run.manual_gc and interval and iteration % interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Wrap an evaluation: collect everything before it, and what it left after it."""
        if self._run.manual_gc:
            gc.collect()
        yield
        if self._run.manual_gc:
            gc.collect(generation=0)
