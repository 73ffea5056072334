"""Progress of commands that take a while: on a terminal's standard error, and only there. Without tqdm there is none.

Nothing is shown of what is done within `PATIENCE_S`, and nothing remains when it is done.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from megatron.zerobubble.plan.search.search_progress import Progress

__all__ = ["PATIENCE_S", "stoppable", "track", "waited"]

Item = TypeVar("Item")

PATIENCE_S = 2.0
"""Seconds before anything is shown."""
_REFRESH_S = 1.0


def stoppable(what: str, work: Callable[[Progress], Item], *, least: str = "the best possible") -> Item:
    """Do work that contains a search and show the best it has found. Ctrl-C ends the search with that; a second one ends all.

    Args:
        what: what is being done.
        work: does it, in a thread of its own; it gets the progress that its searches need.
        least: what the lower bound of a search is the bound of.
    """
    shown = [what]

    def report(schedule: str, best_ms: float, bound_ms: float) -> None:
        gap = f", at most {100 * (best_ms / bound_ms - 1):.2f} % above {least}" if bound_ms > 0 else ""
        shown[0] = f"{what} ({schedule}: {best_ms:.2f} ms{gap}; Ctrl-C takes it)"

    progress = Progress(report)
    with ThreadPoolExecutor(1, thread_name_prefix="search") as pool:
        future = pool.submit(work, progress)
        try:
            return waited(future, lambda: shown[0])
        except KeyboardInterrupt:
            progress.stop()
            print(f"{what}: stopped, with the best found so far", file=sys.stderr)
            return future.result()


def waited(future: Future[Item], what: Callable[[], str]) -> Item:
    """The result of a future; until it is there, a text and the time that it has taken are shown once a second."""
    tqdm = _tqdm()
    if tqdm is None:
        return future.result()
    if not wait([future], PATIENCE_S).not_done:
        return future.result()
    with tqdm(desc=what(), bar_format="{desc}: {elapsed}", leave=False, initial=0) as bar:
        bar.start_t -= PATIENCE_S
        while wait([future], _REFRESH_S).not_done:
            bar.set_description_str(what())
    return future.result()


def track(items: Iterable[Item], what: str) -> Iterable[Item]:
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
