"""Maps a function over pieces of work in several processes, in order, with few pieces under way.

The processes are forked from one that has the imports done (a fork server), which costs seconds once and not once per process.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from megatron.zerobubble.errors import DataError

__all__ = ["map_in_processes"]

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_PIECES_PER_PROCESS = 3


def map_in_processes(
    function: Callable[[Piece], Result],
    pieces: Iterable[Piece],
    *,
    num_processes: int,
    preload: Sequence[str],
    initializer: Callable[..., None],
    initargs: tuple[Any, ...],
    remedy: str,
) -> Generator[Result]:
    """`function` of each piece, in order.

    Args:
        function: of a module, picklable.
        pieces: read as results are taken.
        num_processes: how many.
        preload: modules that are imported once, before processes are forked.
        initializer: called once in every process.
        initargs: of `initializer`.
        remedy: end of the error of a process that died.

    Raises:
        DataError: a process died.
        Exception: whatever `function` raises.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    pool = ProcessPoolExecutor(num_processes, context, initializer=initializer, initargs=initargs)
    pending: deque[Future[Result]] = deque()
    try:
        for piece in pieces:
            pending.append(pool.submit(function, piece))
            if len(pending) > _PIECES_PER_PROCESS * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(f"a tokenizing process died, perhaps for lack of memory; {remedy}") from None
    finally:
        pool.shutdown(cancel_futures=True)
