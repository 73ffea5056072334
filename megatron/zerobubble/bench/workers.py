"""A process per rank and block, so that a contender inherits nothing from the one before, and its failure ends it alone.

The process that the launcher started on each rank trains nothing. For each block it starts a child, which joins the children of
the other ranks through the launcher's store, and waits for it. If a child fails, the others are ended and the block is a
`BlockFailure`; the next block starts from the same clean state. A child is forked where no GPU is in use by its parent, with
torch and megatron-core imported already; otherwise it is spawned.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.zerobubble.bench.block import BlockRequest, BlockResult, run_block
from megatron.zerobubble.job.error_file import read_error_file
from megatron.zerobubble.job.failure import lost_a_peer
from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.job.launch import Launch, enter_block

__all__ = ["BlockFailure", "Interrupted", "Workers"]

_POLL_S = 0.2
_GRACE_S = 10.0
"""Seconds that a rank waits after another one's failure for its own child to end by itself, with a reason that is its own."""
_MOST = 300
"""Most characters of a message."""
_PLACE = re.compile(r'\s*File "([^"]+)", line (\d+)')
"""In a traceback."""
_PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent ends."""


class Interrupted(Exception):  # noqa: N818 - a request of the user, no error
    """The user or the launcher asked the job to end."""


@dataclass(frozen=True)
class BlockFailure:
    """A block that did not end."""

    reason: str
    """One line."""
    is_own: bool = True
    """Whether this rank knows the cause. A rank that only lost its peers, or left without a reason, does not."""


class Workers:
    """Runs blocks, one after the other, on all ranks.

    Args:
        launch: which rank this process is.
        store: shared by all ranks, and by none of the blocks.
        logs: directory for what the children print.
        run: runs one block in the child, which ends with the result.
    """

    def __init__(self, launch: Launch, store: Store, logs: Path, *, run: Callable[..., None] = run_block) -> None:
        self._launch, self._store, self._logs, self._run = launch, store, logs, run
        self._interrupted = False

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """While this is open, SIGINT and SIGTERM end the running block's child and raise `Interrupted`."""

        def note(number: int, frame: FrameType | None) -> None:
            self._interrupted = True

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, request: BlockRequest, *, tick: Callable[[], None]) -> BlockResult | BlockFailure:
        """Run a block. All ranks must call it with the same request.

        Args:
            request: the block.
            tick: called on every rank after each of its iterations.

        Returns:
            This rank's result; the same failure on all ranks if any of them failed.

        Raises:
            Interrupted: a signal came.
        """
        outcome = self._run_child(request, tick)
        key = f"block-{request.number}"
        if isinstance(outcome, BlockFailure):
            cause = outcome.reason
            if not outcome.is_own:  # then the first of these is the likeliest
                cause = self._store.compare_set(f"{key}/left", "", cause).decode(errors="replace")
                self._wait_for(f"{key}/failed")
            self._store.compare_set(f"{key}/failed", "", cause)
        self._store.add(f"{key}/ended", 1)
        self._wait_for_all(f"{key}/ended")
        if self._store.check([f"{key}/failed"]):
            outcome = BlockFailure(self._store.get(f"{key}/failed").decode(errors="replace"))
        self._store.add(f"{key}/read", 1)
        if self._launch.rank == 0:  # which may host the store, and leave after the last block
            self._wait_for_all(f"{key}/read")
        return outcome

    def _wait_for_all(self, key: str) -> None:
        while self._store.add(key, 0) < self._launch.world_size:
            self._check_interrupted()
            time.sleep(_POLL_S)

    def _wait_for(self, key: str) -> None:
        """Give the rank that knows the cause time to report it."""
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and not self._store.check([key]):
            self._check_interrupted()
            time.sleep(_POLL_S)

    def _run_child(self, request: BlockRequest, tick: Callable[[], None]) -> BlockResult | BlockFailure:
        context: Any = multiprocessing.get_context("spawn" if _uses_gpu() else "fork")
        receiving, sending = context.Pipe(duplex=False)
        log = self._logs / f"block-{request.number}-rank-{self._launch.rank}.log"
        reason = log.with_suffix(".json")
        child = context.Process(target=_serve, args=(self._run, sending, request, self._launch, log, reason, os.getpid()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside other threads, from Python 3.12 on: of the store's
            child.start()
        sending.close()
        try:
            outcome = self._listen(receiving, child, request, tick)
        finally:
            if child.is_alive():
                child.kill()
            child.join()
            receiving.close()
        cause = read_error_file(reason)
        reason.unlink(missing_ok=True)
        return outcome or _ended(child.exitcode, self._launch.rank, log, cause)

    def _listen(
        self, receiving: Connection, child: Any, request: BlockRequest, tick: Callable[[], None]
    ) -> BlockResult | BlockFailure | None:
        """Until the child ends or must be ended; what it reported, None if nothing."""
        last_call: float | None = None
        while True:
            self._check_interrupted()
            if last_call is None and self._store.check([f"block-{request.number}/failed"]):
                last_call = time.monotonic() + _GRACE_S
            if last_call is not None and time.monotonic() > last_call:
                return None
            if not receiving.poll(_POLL_S):
                if not child.is_alive() and not receiving.poll(0):
                    return None
                continue
            try:
                message = receiving.recv()
            except EOFError:
                child.join(_GRACE_S)
                return None
            if message is None:
                tick()
            else:
                child.join(_GRACE_S)
                return message

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise Interrupted


def _uses_gpu() -> bool:
    import torch

    return torch.cuda.is_initialized()


def _serve(
    run: Callable[..., None], sending: Connection, request: BlockRequest, launch: Launch, log: Path, reason: Path, parent: int
) -> None:
    """The child: run the block, and send None after every iteration, then the result or a failure.

    What joins the ranks of a job (`JobGuard`) leaves the cause of a failure in the file `reason` and ends the process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    _redirect(log)

    def end(result: BlockResult) -> None:
        sending.send(result)
        sending.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # process groups need no farewell, and exit handlers may wait for other ranks

    try:
        run(request, enter_block(launch, request.number, reason), tick=lambda: sending.send(None), end=end)
    except Exception as error:
        sending.send(BlockFailure(_line(error, launch.rank), is_own=not lost_a_peer(error)))
        raise


def _redirect(log: Path) -> None:
    """Send standard output and standard error to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _line(error: BaseException, rank: int) -> str:
    """An exception in one line, with the rank and the place; one for the user has neither."""
    text = " ".join(str(error).split())[:_MOST]
    if type(error).__module__.startswith("megatron.zerobubble"):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in place)
    return f"rank {rank}: {type(error).__name__}{': ' if text else ''}{text}{where}"


def _ended(exit_code: int | None, rank: int, log: Path, reason: str | None) -> BlockFailure:
    """The failure of a child that reported nothing, but may have left a reason, and a traceback in its log."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    if reason is not None:
        reason = reason.removeprefix("zerobubble bench: ").removeprefix("error: ")[:_MOST]
        places = [found for found in map(_PLACE.match, lines) if found] if reason.startswith(f"rank {rank} failed") else []
        return BlockFailure(reason + "".join(f" ({file}:{number})" for file, number in (each.groups() for each in places[-1:])))
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        memory = ": the machine may have run out of memory" if name == "SIGKILL" else ""
        return BlockFailure(f"rank {rank} was ended by {name}{memory} (see {log})")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")[:_MOST]
    return BlockFailure(f"rank {rank} exited with code {exit_code}, its last line: {last} (see {log})", is_own=False)
