"""The pool of worker processes: starts them, writes requests, reads events, and ends them.

Every task runs in a process of its own (`worker`), so that it can be stopped at any point, even in the compiled core. One spare
process waits with its imports done, which saves the first plan a quarter of a second. The number of concurrent searches is
limited to the number of cores; short tasks have slots of their own, so that a file opens while two pages search.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from pathlib import Path

from megatron.zerobubble.playground.limits import MAX_BODY_BYTES, TASK_SECONDS
from megatron.zerobubble.playground.tasks import SEARCHES, encode

_ROOT = Path(__file__).resolve().parents[3]
_TICK_SECONDS = 0.4
"""Interval of the ticks to the page during a search; the server notices a closed connection at a tick."""
_MOST_WAITING = 24
_SOON_OVER = 2
_ERROR = b'{"event":"error"'


class Busy(Exception):  # noqa: N818 - it is a state, not an error of ours
    """Too many tasks are waiting."""


class Pool:
    """All workers of a server. Use it from the server's event loop only.

    Args:
        search_seconds: time limit of a search, in seconds.
    """

    def __init__(self, *, search_seconds: float) -> None:
        self._search_seconds = search_seconds
        self._searches = asyncio.Semaphore(num_searches())
        self._others = asyncio.Semaphore(_SOON_OVER)
        self._waiting = 0
        self._spare: Process | None = None
        self._preparing = asyncio.Lock()
        self._is_stopping = False

    async def prepare(self) -> None:
        """Start the spare process if there is none."""
        async with self._preparing:
            if self._spare is None or self._spare.returncode is not None:
                self._spare = await _start()

    def stop(self) -> None:
        """End every task within a tick, because the server is about to end. May be called by a signal handler."""
        self._is_stopping = True

    async def close(self) -> None:
        """End the spare process; busy ones end with their requests."""
        if self._spare is not None:
            await _end(self._spare)

    async def events(self, task: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Run a task and yield its events as lines, with ``tick`` events in between; closing the iterator ends the worker.

        Raises:
            Busy: too many tasks are waiting.
        """
        slots = self._searches if task in SEARCHES else self._others
        if self._waiting >= _MOST_WAITING:
            raise Busy
        self._waiting += 1
        try:
            while True:
                try:
                    await asyncio.wait_for(slots.acquire(), _TICK_SECONDS)
                    break
                except TimeoutError:
                    yield encode({"event": "tick", "state": "queued", "elapsed_s": 0.0})
        finally:
            self._waiting -= 1
        try:
            seconds = self._search_seconds if task in SEARCHES else TASK_SECONDS
            async for line in self._work(task, body, seconds):
                yield line
        finally:
            slots.release()

    async def _work(self, task: str, body: bytes, seconds: float) -> AsyncGenerator[bytes, None]:
        process, self._spare = self._spare, None
        if process is None or process.returncode is not None:
            process = await _start()
        refill = asyncio.create_task(self.prepare())
        begin = time.monotonic()
        feeding = asyncio.create_task(_feed(process, task, body))
        try:
            async for line in _lines(process):
                elapsed = time.monotonic() - begin
                if line is not None:
                    yield line
                    if is_error(line):
                        return
                elif self._is_stopping:
                    yield encode({"event": "stopped", "message": "the server has ended", "elapsed_s": elapsed})
                    return
                elif elapsed > seconds:
                    yield encode({"event": "stopped", "message": f"stopped at the limit of {seconds:g} s", "elapsed_s": elapsed})
                    return
                else:
                    yield encode({"event": "tick", "state": "running", "elapsed_s": round(elapsed, 1)})
            code = await process.wait()
            if code != 0:
                yield encode({"event": "error", "message": _ended(code)})
        finally:
            feeding.cancel()
            await asyncio.shield(_end(process))
            await asyncio.shield(refill)


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


async def _start() -> Process:
    # A session of its own: Ctrl-C in the terminal is for the server, which ends its workers itself.
    command = (sys.executable, "-m", "megatron.zerobubble.playground.worker")
    return await asyncio.create_subprocess_exec(
        *command, cwd=_ROOT, stdin=PIPE, stdout=PIPE, limit=2 * MAX_BODY_BYTES, start_new_session=True
    )


async def _feed(process: Process, task: str, body: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended; its exit code is reported
        process.stdin.write(task.encode() + b"\n" + body)
        await process.stdin.drain()
        process.stdin.close()


async def _lines(process: Process) -> AsyncGenerator[bytes | None, None]:
    """The lines that the process writes, and None after every tick without one."""
    assert process.stdout is not None
    while True:
        reading = asyncio.create_task(process.stdout.readline())
        try:
            while not (await asyncio.wait({reading}, timeout=_TICK_SECONDS))[0]:
                yield None
            line = reading.result()
        finally:
            reading.cancel()
        if not line:
            return
        yield line


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself a moment ago
            process.kill()
    await process.wait()
