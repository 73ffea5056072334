"""The worker processes: start one for a task, write its request, read its events, and end it.

Every task runs in a process of its own (`worker`), so that it can be stopped at any point, even in the compiled core. One spare
process waits with its imports done, which saves each plan a quarter of a second. The number of concurrent searches is limited to
the number of cores; short tasks have slots of their own, so that a file opens while two pages search.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from megatron.zerobubble.playground.limits import TASK_SECONDS
from megatron.zerobubble.playground.tasks import SEARCHES, encode

_ROOT = Path(__file__).resolve().parents[3]
_TICK_SECONDS = 0.4
"""Interval of the ticks to the page during a search; the server notices a closed connection at a tick."""
_SOON_OVER = 2
_ERROR = b'{"event":"error"'

Process = subprocess.Popen[bytes]


class TaskWorkers:
    """All workers of a server, for its threads.

    Args:
        search_seconds: time limit of a search, in seconds.
    """

    def __init__(self, *, search_seconds: float) -> None:
        self._search_seconds = search_seconds
        self._searches = threading.Semaphore(num_searches())
        self._others = threading.Semaphore(_SOON_OVER)
        self._lock = threading.Lock()
        self._busy: set[Process] = set()
        self._is_stopping = False
        self._spare = _start()

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
        with self._lock:
            for process in (self._spare, *self._busy):
                process.kill()
        until = time.monotonic() + 5 * _TICK_SECONDS
        while self._busy and time.monotonic() < until:
            time.sleep(_TICK_SECONDS / 10)
        self._spare.wait()

    def _work(self, task: str, body: bytes, seconds: float) -> Iterator[bytes]:
        process = self._take()
        begin = time.monotonic()
        try:
            _feed(process, task, body)
            for line in _lines(process):
                elapsed = time.monotonic() - begin
                if line is not None:
                    yield line
                    if is_error(line):
                        return
                elif elapsed > seconds:
                    yield encode({"event": "stopped", "message": f"stopped at the limit of {seconds:g} s", "elapsed_s": elapsed})
                    return
                else:
                    yield encode({"event": "tick", "state": "running", "elapsed_s": round(elapsed, 1)})
            code = process.wait()
            if self._is_stopping:
                yield encode({"event": "stopped", "message": "the server has ended", "elapsed_s": time.monotonic() - begin})
            elif code != 0:
                yield encode({"event": "error", "message": _ended(code)})
        finally:
            process.kill()
            process.wait()
            self._busy.discard(process)

    def _take(self) -> Process:
        """The spare process, and start the next one."""
        with self._lock:
            taken, self._spare = self._spare, _start()
            if taken.poll() is not None:
                taken = _start()
            self._busy.add(taken)
        return taken


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


def _start() -> Process:
    # A session of its own: Ctrl-C in the terminal is for the server, which ends its workers itself.
    command = (sys.executable, "-m", "megatron.zerobubble.playground.worker")
    return subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _feed(process: Process, task: str, body: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended; its exit code is reported
        process.stdin.write(task.encode() + b"\n" + body)
        process.stdin.close()


def _lines(process: Process) -> Iterator[bytes | None]:
    """The lines that the process writes, and None after every tick without one."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, name="worker-output", daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            yield None
            continue
        if not line:
            return
        yield line
