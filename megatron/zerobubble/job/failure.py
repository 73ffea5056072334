"""A rank that fails ends the whole job at once, and its own traceback is the one that the user reads.

When one rank of a pipeline raises, its neighbors see closed connections and raise too, and the first message in the log is about
a socket. So the first rank that fails records itself in the job's store *before* its connections close, prints its traceback, and
exits without running exit handlers (which could wait for other ranks). A rank that fails afterwards because a peer is gone finds
the record and prints one line, with the first one's reason. torchrun sees the first exit and ends the other ranks.

A rank that was killed records nothing. So one that has lost a peer first waits for a record, looks which process of its machine
is gone, and then whose heartbeats from another machine have ended. It leaves at once after a failure on another machine, whose
torchrun ends no rank here; otherwise the one that failed first is given time to exit first.

A `UserError` is reported as one line with exit code 2, as before the process group is initialized. One rank of every machine
prints it.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import torch

from megatron.zerobubble.errors import TransferError, UserError
from megatron.zerobubble.files import disk_error
from megatron.zerobubble.job.error_file import write_error_file
from megatron.zerobubble.job.exit import leave_now
from megatron.zerobubble.job.heartbeats import Beat, is_gone, published, this_host
from megatron.zerobubble.job.key_value_store import Store, answered
from megatron.zerobubble.job.launch import store_name
from megatron.zerobubble.runtime.watch import Doing

__all__ = ["JobGuard", "RankFailure", "first_to_fail", "is_first_here", "lost_a_peer", "who_failed"]

_KEY = "first_failure"
_GRACE_S = 3.0
"""Seconds that a rank which failed after another one waits: torchrun ends the job at the first exit, and the reason that it shows
is that of the rank that exited."""
_LOOK_S, _LEAST_LOOKS = 0.2, 10
"""Seconds between two looks for the reason by a rank that has lost a peer, and how often it looks at least."""
_SILENT_BEATS = 3.5
"""Heartbeats that do not come before a rank of another machine counts as gone."""
_NO_RANK = -1
_STORE_S = 20.0
"""Seconds in which the job's store has to answer, looks included."""
_LOST_PEER = ("connection closed", "connection reset", "broken pipe", "connection refused", "timed out", "nccl", "gloo")
"""Parts of the error messages that process groups raise when a peer is gone."""


class RankFailure(NamedTuple):
    """A rank that failed, or holds up the job."""

    rank: int
    line: str
    """The reason, in one line."""
    host: str
    """Its machine, as `heartbeats.this_host` names it."""
    is_hang: bool = False
    """Whether it makes no progress; else it has ended, or is about to."""


class JobGuard:
    """Context manager around everything a rank does after joining the job: reports an exception and ends the process.

    Args:
        store: the job's store.
        rank: this rank.
        leave: ends the process with an exit code, without exit handlers.
        stream: where to print the report; None: standard error.
        error_file: where torchrun expects the reason of this rank's failure; None without torchrun.
        pause: waits for some seconds.
        world_size: number of ranks that publish heartbeats; 0: none do.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        leave: Callable[[int], object] = leave_now,
        stream: TextIO | None = None,
        error_file: str | None = None,
        pause: Callable[[float], object] = time.sleep,
        world_size: int = 0,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._host = this_host()
        self._leave = leave
        self._stream = stream
        self._error_file = error_file
        self._pause = pause
        self._uncaught: tuple[Any, Any] = (None, None)
        """What `take_uncaught` installed, and what was there before."""
        self.doing: Callable[[], Doing | None] = lambda: None
        """Returns what this rank is doing; called when it fails. None: unknown."""

    def follow(self, store: Store, rank: int, *, world_size: int, doing: Callable[[], Doing | None]) -> None:
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
        if isinstance(error, SystemExit) and error.code:
            self._record_exit(error)
        if not isinstance(error, Exception):
            return
        doing = self.doing()
        has_lost_a_peer = lost_a_peer(error)
        failure = self._first_failure(error, doing, has_lost_a_peer=has_lost_a_peer)
        is_own, is_elsewhere = failure.rank == self._rank, failure.host != self._host
        if isinstance(error, UserError) and not has_lost_a_peer:
            report = f"error: {error}\n" if is_own else ""
        elif is_own or not has_lost_a_peer:
            report = f"rank {self._rank} failed{_while(doing)}:\n" + "".join(traceback.format_exception(error))
        else:
            report = f"rank {self._rank} stops{_while(doing)}: {failure.line}\n"
        if is_elsewhere and not report and is_first_here(self._store, self._host):
            report = f"rank {self._rank} stops: {failure.line}\n"
        stream = self._stream or sys.stderr
        stream.write(report)
        if is_own or is_elsewhere:
            line = f"error: {error}" if is_own and isinstance(error, UserError) else failure.line
            write_error_file(self._error_file, line, details=report.strip())
        sys.stdout.flush()
        stream.flush()
        if not (is_own or is_elsewhere):
            self._pause(_GRACE_S)
        self._leave(2 if isinstance(error, UserError) else 1)

    def _record_exit(self, error: SystemExit) -> None:
        """Record that the script itself ends this rank, for those that will lose it; what it has to say it has printed."""
        first = own = RankFailure(self._rank, f"rank {self._rank} ended: {_why_it_exits(error)}", self._host)
        with suppress(RuntimeError):
            first = answered(lambda: first_to_fail(self._store, own), _STORE_S)
        if first.rank == self._rank:
            write_error_file(self._error_file, own.line)

    def _first_failure(self, error: Exception, doing: Doing | None, *, has_lost_a_peer: bool) -> RankFailure:
        """The failure on record, after this rank's own or that of a rank which is gone is, if there was none."""
        own = RankFailure(self._rank, _line(error, rank=self._rank, doing=_while(doing)), self._host)

        def agree() -> RankFailure:
            gone = self._who_is_gone(None if doing is None else doing.waits_for) if has_lost_a_peer else None
            return first_to_fail(self._store, gone or own)

        try:
            return answered(agree, _STORE_S)
        except RuntimeError:  # the store is gone with the machine that hosted it, or with a rank
            if not has_lost_a_peer:
                return own
            return RankFailure(_NO_RANK, f"{store_name()} is gone: that host, or what it ran of this job, has ended", "")

    def _who_is_gone(self, waits_for: int | None) -> RankFailure | None:
        """A rank that is gone without a record, once that is seen; None if a rank has recorded itself, or all are there.

        Args:
            waits_for: the rank whose message this one was waiting for.
        """
        before = published(self._store, [rank for rank in range(self._world_size) if rank != self._rank])
        before = {rank: beat for rank, beat in before.items() if not beat.is_last}
        here = {rank: beat for rank, beat in before.items() if beat.host == self._host}
        longest_s = max((_SILENT_BEATS * beat.interval_s for beat in before.values()), default=0.0)
        for _ in range(max(_LEAST_LOOKS, round(longest_s / _LOOK_S))):
            if who_failed(self._store) is not None:
                return None
            gone = {rank: beat for rank, beat in here.items() if is_gone(beat)}
            if gone:
                return _gone(gone, waits_for)
            self._pause(_LOOK_S)
        beats = published(self._store, [rank for rank in before if rank not in here])
        silent = {rank: beat for rank, beat in beats.items() if beat == before[rank]}
        return _gone(silent, waits_for) if silent and who_failed(self._store) is None else None


def first_to_fail(store: Store, failure: RankFailure) -> RankFailure:
    """Record a failure, unless another one was before; return the one that is on record. Raises RuntimeError without a store."""
    return RankFailure(*json.loads(store.compare_set(_KEY, "", json.dumps(failure))))


def who_failed(store: Store) -> RankFailure | None:
    """The first failure; None if no rank has failed."""
    return RankFailure(*json.loads(store.get(_KEY))) if store.check([_KEY]) else None


def is_first_here(store: Store, host: str) -> bool:
    """Whether no other rank of this machine has asked before: the one that prints the reason of another one's failure."""
    with suppress(RuntimeError):
        return answered(lambda: store.add(f"told on {host}", 1), _STORE_S) == 1
    return True


def _gone(beats: Mapping[int, Beat], waits_for: int | None) -> RankFailure:
    """The failure of ranks that are gone, given their last heartbeats."""
    rank = waits_for if waits_for is not None and waits_for in beats else min(beats)
    beat, others = beats[rank], [str(each) for each in sorted(beats) if each != rank]
    also = f" with rank{'s' if len(others) > 1 else ''} {', '.join(others)}" if others else ""
    before = "" if beat.doing is None else f"; when last heard of, it {beat.doing}"
    return RankFailure(rank, f"rank {rank} ({beat.process}) is gone{also}, ended from outside{before}", beat.host)


def _line(error: Exception, *, rank: int, doing: str) -> str:
    """The reason in one line."""
    if isinstance(error, UserError):
        return f"{error} (rank {rank} on {socket.gethostname()} has ended)"  # all ranks may raise it, about another one's disk
    line = traceback.format_exception_only(error)[0].partition("\n")[0]  # its notes come after
    disk = disk_error(error)
    return f"rank {rank} failed{doing}: {line}" + ("" if disk in (None, error) else f" ({disk})")


def _why_it_exits(error: SystemExit) -> str:
    """The message that a script, or argparse for it, ends with; else its exit code and where it calls `sys.exit`."""
    *_, (last, number) = traceback.walk_tb(error.__traceback__)
    code, message = error.code, last.f_locals.get("message") if last.f_code is argparse.ArgumentParser.exit.__code__ else None
    text = str(message or "" if isinstance(code, int) else code).strip()
    where = f"{last.f_code.co_filename}, line {number}"
    return text.splitlines()[-1] if text else f"exit code {code} by {where}; what it printed before says why"


def _while(doing: Doing | None) -> str:
    return "" if doing is None else f" while it {doing.text}"


def lost_a_peer(error: Exception) -> bool:
    """Whether an error only means that another rank is gone."""
    reason: BaseException | None = error
    while reason is not None:  # megatron-core raises an error of its own about one in a collective
        if isinstance(reason, TransferError | torch.distributed.DistError | ConnectionError):
            return True
        if isinstance(reason, RuntimeError) and any(sign in str(reason).lower() for sign in _LOST_PEER):
            return True
        reason = None if isinstance(reason, UserError) else reason.__cause__
    return False
