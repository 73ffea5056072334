"""The worker processes: start one for a task, yield its events, and end it.

Every task runs in a process of its own, so that it can be stopped at any point, even in the compiled core. The processes are
forked from one that has the imports done, which saves each plan a quarter of a second. The number of concurrent searches is
limited to the number of cores; short tasks have slots of their own, so that a file opens while two pages search.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import signal
import threading
import time
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from megatron.zerobubble.playground.limits import TASK_SECONDS, WORKER_BYTES
from megatron.zerobubble.playground.tasks import SEARCHES, encode, run_task

_TICK_SECONDS = 0.4
"""Interval of the ticks to the page during a search; the server notices a closed connection at a tick."""
_SOON_OVER = 2
_ERROR = b'{"event":"error"'


class TaskWorkers:
    """All workers of a server, for its threads.

    Args:
        search_seconds: time limit of a search, in seconds.
    """

    def __init__(self, *, search_seconds: float) -> None:
        self._search_seconds = search_seconds
        self._searches = threading.Semaphore(num_searches())
        self._others = threading.Semaphore(_SOON_OVER)
        self._busy: set[BaseProcess] = set()
        self._is_stopping = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        multiprocessing.forkserver.ensure_running()

    def events(self, task: str, body: bytes) -> Generator[bytes, None, None]:
        """Run a task and yield its events as lines, with ``tick`` events in between; closing the iterator ends the worker."""
        slots = self._searches if task in SEARCHES else self._others
        while not slots.acquire(timeout=_TICK_SECONDS):
            yield encode({"event": "tick", "state": "queued", "elapsed_s": 0.0})
        try:
            yield from self._work(task, body, self._search_seconds if task in SEARCHES else TASK_SECONDS)
        finally:
            slots.release()

    def stop(self) -> None:
        """End all workers, and wait a moment until the pages have been told."""
        self._is_stopping = True
        for process in tuple(self._busy):
            process.kill()
        until = time.monotonic() + 5 * _TICK_SECONDS
        while self._busy and time.monotonic() < until:
            time.sleep(_TICK_SECONDS / 10)

    def _work(self, task: str, body: bytes, seconds: float) -> Iterator[bytes]:
        receiving, sending = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_serve, args=(sending, task, body), daemon=True)
        begin = time.monotonic()
        process.start()
        sending.close()
        self._busy.add(process)
        try:
            while True:
                is_there, elapsed = receiving.poll(_TICK_SECONDS), time.monotonic() - begin
                if is_there:
                    try:
                        line = receiving.recv_bytes()
                    except EOFError:
                        break
                    yield line
                    if is_error(line):
                        return
                elif elapsed > seconds:
                    yield encode({"event": "stopped", "message": f"stopped at the limit of {seconds:g} s", "elapsed_s": elapsed})
                    return
                else:
                    yield encode({"event": "tick", "state": "running", "elapsed_s": round(elapsed, 1)})
            process.join()
            if self._is_stopping:
                yield encode({"event": "stopped", "message": "the server has ended", "elapsed_s": time.monotonic() - begin})
            elif process.exitcode:
                yield encode({"event": "error", "message": _ended(process.exitcode)})
        finally:
            process.kill()
            process.join()
            receiving.close()
            self._busy.discard(process)


def _serve(sending: Connection, task: str, body: bytes) -> None:
    """The worker: limit the memory of the process, then run the task and send its events."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the server, which ends its workers
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    for event in run_task(task, body):
        sending.send_bytes(encode(event))


def _ended(code: int) -> str:
    if code < 0:
        return f"the worker process was ended by signal {-code}; out of memory is likely"
    return f"the worker process failed (exit code {code}); the terminal of the server has its traceback, please report it"


def num_searches() -> int:
    """How many searches run at once: one per CPU core."""
    return max(1, os.cpu_count() or 1)


def is_error(line: bytes) -> bool:
    """Whether a line is an error event."""
    return line.startswith(_ERROR)
