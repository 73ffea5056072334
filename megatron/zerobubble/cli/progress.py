"""Progress of commands that take a while: on a terminal's standard error, and only there. Without tqdm there is none.

Nothing is shown of what is done within `PATIENCE_S`, and nothing remains when it is done.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

__all__ = ["PATIENCE_S", "track", "working"]

Item = TypeVar("Item")

PATIENCE_S = 2.0
"""Seconds before anything is shown."""
_REFRESH_S = 1.0


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show `what` and the time that the body of the `with` statement has taken, once a second.

    Args:
        what: what is being done, and how long it takes if that is known.
    """
    tqdm = _tqdm()
    if tqdm is None:
        yield
        return
    done = threading.Event()

    def show() -> None:
        if done.wait(PATIENCE_S):
            return
        with tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False, initial=0) as bar:
            bar.start_t -= PATIENCE_S
            while not done.wait(_REFRESH_S):
                bar.refresh()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def track(items: Sequence[Item], what: str) -> Iterable[Item]:
    """`items`, with a bar of how many are done and the time left.

    Args:
        items: what a loop iterates over.
        what: what is being done.
    """
    tqdm = _tqdm()
    bar: Iterable[Item] = items if tqdm is None else tqdm(items, desc=what, leave=False, delay=PATIENCE_S)
    return bar


def _tqdm() -> Any | None:
    """tqdm's class, if standard error is a terminal and the package is installed."""
    if not sys.stderr.isatty():
        return None
    with contextlib.suppress(ImportError):
        return importlib.import_module("tqdm").tqdm
    return None
