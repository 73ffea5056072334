"""A rank that fails ends the whole job, at once and with its own traceback on top.

When one rank of a pipeline raises, its neighbours see closed connections and raise too, and what the user reads first is a
complaint about a socket. So the first rank that fails records itself in the job's store *before* its connections close,
prints its traceback, and leaves without running exit handlers (which could wait for other ranks). A rank that fails
afterwards because a peer is gone finds the record and prints one line. torchrun sees the first exit and ends the others.

An error of the user (`UserError`) is one line and exit code 2, as it is before the ranks have met.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

import torch

from megatron.zerobubble.errors import TransferError, UserError

__all__ = ["JobGuard", "Store", "first_to_fail"]

_KEY = "first_failure"
_LOST_PEER = ("connection closed", "connection reset", "broken pipe", "connection refused", "timed out", "nccl", "gloo")
"""What the messages of process groups have in common when a peer is gone."""


class Store(Protocol):
    """The part of torch.distributed's key-value stores that is needed here."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if it is `expected` (or unset and that is empty); return what it is then."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key`, which begins at 0; return what it is then."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""

    def get(self, key: str) -> bytes:
        """The value of a key."""

    def clone(self) -> Store:
        """The same store over a connection of its own, for another thread."""


class JobGuard:
    """Around everything a rank does once it has joined the job. A context manager.

    Args:
        store: the job's store.
        rank: this rank.
        leave: ends the process with an exit code, without exit handlers.
        stream: where to report.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        leave: Callable[[int], object] = os._exit,
        stream: TextIO | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._leave = leave
        self._stream = stream
        self.doing: Callable[[], str | None] = lambda: None
        """Asked, when this rank fails, what it was doing."""

    def __enter__(self) -> JobGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        stream = self._stream or sys.stderr
        first = first_to_fail(self._store, self._rank)
        report = _report(error, rank=self._rank, first=first, doing=self.doing())
        if report:
            stream.write(report)
        sys.stdout.flush()
        stream.flush()
        self._leave(2 if isinstance(error, UserError) else 1)


def first_to_fail(store: Store, rank: int) -> int:
    """Record that `rank` failed, unless another one did before; return the one that was first."""
    try:
        return int(store.compare_set(_KEY, "", str(rank)))
    except (RuntimeError, ValueError):  # the store went down with the rank that held it: say what we know
        return rank


def _report(error: Exception, *, rank: int, first: int, doing: str | None) -> str:
    if isinstance(error, UserError):
        return f"error: {error}\n" if first == rank else ""
    if first != rank and _lost_a_peer(error):
        return f"rank {rank} stops{_while(doing)}: rank {first} failed first, see its traceback\n"
    return f"rank {rank} failed{_while(doing)}:\n" + "".join(traceback.format_exception(error))


def _while(doing: str | None) -> str:
    return "" if doing is None else f" while it {doing}"


def _lost_a_peer(error: Exception) -> bool:
    """Whether an error says no more than that another rank is gone."""
    if isinstance(error, TransferError | torch.distributed.DistError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _LOST_PEER)
