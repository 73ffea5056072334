"""A rank that fails ends the whole job at once, and its own traceback is the one that the user reads.

When one rank of a pipeline raises, its neighbors see closed connections and raise too, and the first message in the log is about
a socket. So the first rank that fails records itself in the job's store *before* its connections close, prints its traceback, and
exits without running exit handlers (which could wait for other ranks). A rank that fails afterwards because a peer is gone finds
the record and prints one line, with the first one's reason. torchrun sees the first exit and ends the other ranks.

A rank that was killed records nothing. So one that has lost a peer first waits a moment for a record, and looks which process of
its machine is gone.

A `UserError` is reported as one line with exit code 2, as before the process group is initialized.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import torch

from megatron.zerobubble.errors import TransferError, UserError
from megatron.zerobubble.job.error_file import write_error_file
from megatron.zerobubble.job.heartbeats import Beat, departed
from megatron.zerobubble.job.key_value_store import Store, read_value, typed
from megatron.zerobubble.job.siblings import error_file_beside

__all__ = ["JobGuard", "RankFailure", "first_to_fail", "who_failed"]

_KEY = "first_failure"
_GRACE_S = 3.0
"""Seconds that a rank which failed after another one waits: torchrun ends the job at the first exit, and the reason that it shows
is that of the rank that exited."""
_LOOKS, _LOOK_S = 10, 0.2
"""How often a rank that has lost a peer looks for the reason, and the seconds between two looks."""
_LOST_PEER = ("connection closed", "connection reset", "broken pipe", "connection refused", "timed out", "nccl", "gloo")
"""Parts of the error messages that process groups raise when a peer is gone."""


class RankFailure(NamedTuple):
    """A rank that failed."""

    rank: int
    line: str
    """Its reason, in one line."""


class JobGuard:
    """Context manager around everything a rank does after joining the job: reports an exception and ends the process.

    Args:
        store: the job's store.
        rank: this rank.
        leave: ends the process with an exit code, without exit handlers.
        stream: where to print the report; None: standard error.
        error_file: where torchrun expects the reason of this rank's failure; None without torchrun.
        pause: waits for some seconds.
        world_size: number of ranks that publish beats; 0: none do.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        leave: Callable[[int], object] = os._exit,
        stream: TextIO | None = None,
        error_file: str | None = None,
        pause: Callable[[float], object] = time.sleep,
        world_size: int = 0,
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._rank = rank
        self._leave = leave
        self._stream = stream
        self._error_file = error_file
        self._pause = pause
        self._uncaught: tuple[Any, Any] = (None, None)
        """What `take_uncaught` installed, and what was there before."""
        self.doing: Callable[[], str | None] = lambda: None
        """Returns what this rank is doing, as in "runs 3F0"; called when it fails. None: unknown."""

    def follow(self, store: Store, rank: int, *, world_size: int, doing: Callable[[], str | None]) -> None:
        """Use another store, and report what the rank does there; see the class and `doing`."""
        self._store, self._rank, self._world_size, self.doing = store, rank, world_size, doing

    def take_uncaught(self) -> None:
        """Report exceptions that nothing catches, in place of the process's own report, where this guard is not around it."""
        before = sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, Exception):
                self.__exit__(kind, error, trace)
            else:
                before(kind, error, trace)

        sys.excepthook, self._uncaught = report, (report, before)

    def leave_uncaught(self) -> None:
        """Undo `take_uncaught`, unless something else has been installed since."""
        report, before = self._uncaught
        if before is not None and sys.excepthook is report:
            sys.excepthook = before

    def __enter__(self) -> JobGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        stream = self._stream or sys.stderr
        doing, has_lost_a_peer = _while(self.doing()), _lost_a_peer(error)
        gone = self._who_is_gone() if has_lost_a_peer else {}
        rank = next(iter(gone), self._rank)
        line = _gone(rank, gone[rank]) if gone else _line(error, rank=rank, doing=doing)
        failure = first_to_fail(self._store, rank, line)
        if failure.rank in gone:
            # torchrun compares times in whole seconds, in which the ranks that it ends itself may end, too
            beside = error_file_beside(self._error_file, own_rank=self._rank, rank=failure.rank)
            write_error_file(beside, failure.line)
        if failure.rank != self._rank and has_lost_a_peer:
            report = f"rank {self._rank} stops{doing}: {failure.line}\n"
        elif isinstance(error, UserError):
            report = f"error: {error}\n" if failure.rank == self._rank else ""
        else:
            report = f"rank {self._rank} failed{doing}:\n" + "".join(traceback.format_exception(error))
        stream.write(report)
        if failure.rank == self._rank:
            write_error_file(self._error_file, failure.line, details=report.strip())
        sys.stdout.flush()
        stream.flush()
        if failure.rank != self._rank:
            self._pause(_GRACE_S)
        self._leave(2 if isinstance(error, UserError) else 1)

    def _who_is_gone(self) -> dict[int, Beat]:
        """Ranks whose processes are gone without a record, once that is seen; empty if another rank has recorded itself."""
        with suppress(RuntimeError):  # the store is gone with the rank that hosted it
            for _ in range(_LOOKS if self._world_size else 0):
                if who_failed(self._store) is not None:
                    break
                gone = departed(self._store, self._world_size)
                if gone:
                    return gone
                self._pause(_LOOK_S)
        return {}


def first_to_fail(store: Store, rank: int, line: str) -> RankFailure:
    """Record that `rank` failed and its reason, unless another rank did before; return the failure that is on record."""
    own = RankFailure(rank, line)
    try:
        return _read(store.compare_set(_KEY, "", json.dumps(own._asdict()))) or own
    except RuntimeError:  # the store is gone with the rank that hosted it
        return own


def who_failed(store: Store) -> RankFailure | None:
    """The first failure; None if no rank has failed."""
    return _read(store.get(_KEY)) if store.check([_KEY]) else None


def _read(text: bytes) -> RankFailure | None:
    return read_value(text, "the first failure", lambda fields: typed(RankFailure, fields))


def _gone(rank: int, beat: Beat) -> str:
    before = "" if beat.doing is None else f"; when last heard of, it {beat.doing}"
    return f"rank {rank} (process {beat.process.pid} on {beat.process.host.split()[0]}) is gone, ended from outside{before}"


def _line(error: Exception, *, rank: int, doing: str) -> str:
    """The reason in one line."""
    if isinstance(error, UserError):
        return f"error: {error}"
    return f"rank {rank} failed{doing}: " + traceback.format_exception_only(error)[0].partition("\n")[0]  # its notes come after


def _while(doing: str | None) -> str:
    return "" if doing is None else f" while it {doing}"


def _lost_a_peer(error: Exception) -> bool:
    """Whether an error only means that another rank is gone."""
    reason: BaseException | None = error
    while reason is not None:  # megatron-core raises an error of its own about one in a collective
        if isinstance(reason, TransferError | torch.distributed.DistError | ConnectionError):
            return True
        if isinstance(reason, RuntimeError) and any(sign in str(reason).lower() for sign in _LOST_PEER):
            return True
        reason = None if isinstance(reason, UserError) else reason.__cause__
    return False
