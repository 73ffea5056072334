"""Progress of commands that take a while: on a terminal's standard error, and only there. Without tqdm there is none.

Nothing is shown of what is done within `PATIENCE_S`, and nothing remains when it is done.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from megatron.zerobubble.plan.search.search_progress import Progress

__all__ = ["PATIENCE_S", "stoppable", "track", "working"]

Item = TypeVar("Item")

PATIENCE_S = 2.0
"""Seconds before anything is shown."""
_REFRESH_S = 1.0


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show `what` and the time that the body of the `with` statement has taken, once a second.

    Args:
        what: what is being done, and how long it takes if that is known.

    Yields:
        A function that changes the text.
    """
    shown = [what]

    def change(text: str) -> None:
        shown[0] = text

    tqdm = _tqdm()
    if tqdm is None:
        yield change
        return
    done = threading.Event()

    def show() -> None:
        if done.wait(PATIENCE_S):
            return
        with tqdm(desc=shown[0], bar_format="{desc}: {elapsed}", leave=False, initial=0) as bar:
            bar.start_t -= PATIENCE_S
            while not done.wait(_REFRESH_S):
                bar.set_description_str(shown[0])

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield change
    finally:
        done.set()
        thread.join()


def stoppable(what: str, work: Callable[[Progress], Item], *, least: str = "the best possible") -> Item:
    """Do work that contains a search and show the best it has found. Ctrl-C ends the search with that; a second one ends all.

    Args:
        what: what is being done.
        work: does it, in a thread of its own; it gets the progress that its searches need.
        least: what the lower bound of a search is the bound of.
    """
    with working(what) as show, ThreadPoolExecutor(1, thread_name_prefix="search") as pool:

        def report(schedule: str, best_ms: float, bound_ms: float) -> None:
            gap = f", at most {100 * (best_ms / bound_ms - 1):.2f} % above {least}" if bound_ms > 0 else ""
            show(f"{what} ({schedule}: {best_ms:.2f} ms{gap}; Ctrl-C takes it)")

        progress = Progress(report)
        future = pool.submit(work, progress)
        try:
            return future.result()
        except KeyboardInterrupt:
            progress.stop()
            print(f"{what}: stopped, with the best found so far", file=sys.stderr)
            return future.result()


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
