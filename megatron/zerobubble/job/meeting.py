"""All ranks of an attempt agree on its name, in a store where keys of earlier attempts remain.

torchrun ends and starts all ranks again when one of them dies or a host joins, and hosts one store for all of these attempts. Its
restart counts are no common name: an agent counts only failures of its own ranks. So each rank writes a word of its own, rank 0
proposes a name for the words of all ranks, and the name counts when every rank has found its own word in the proposal. A process
of an earlier attempt is in no proposal once another one has taken its rank.

A rank that ends before it has joined the job gives its reason in place of joining, and the others raise it.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from contextlib import suppress
from typing import Any, NamedTuple

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.messages import one_line

__all__ = ["Attempt", "meet", "new_id", "refuse"]

_PAUSE_S = 0.05
"""Seconds between two looks at the store."""
_LINGER_S = 10.0
"""Seconds for which rank 0 gives the reason why the job ends to ranks that come late."""
_REFUSES_S = 30.0
"""Seconds for which a rank that ends waits until its reason is read."""
_LATE_S = 5.0
"""Seconds by which the others wait longer than rank 0, which knows who is missing."""


class Attempt(NamedTuple):
    """One attempt of the launcher to run the job; the same on all ranks."""

    name: str
    """Tells its keys in the store from those of other attempts."""
    job: str
    """Id of the job, the same in all attempts for which the store has lasted."""
    number: int = 0
    """How many attempts there were before."""

    @property
    def is_restart(self) -> bool:
        """Whether an earlier attempt failed."""
        return self.number > 0

    @property
    def text(self) -> str:
        """The attempt in log lines."""
        return f"restart {self.number}"


class _Word(NamedTuple):
    """What a rank writes when it comes."""

    word: str
    host: str
    reason: str
    """Why it ends instead of joining; empty if it joins."""


class _Proposal(NamedTuple):
    """What rank 0 answers."""

    name: str
    """Of the attempt."""
    reason: str
    """Why the job ends; empty for an attempt."""
    words: dict[str, str]
    """Rank -> the word of the process that this is about."""


def meet(store: Any, launch: Launch, *, timeout_s: float) -> Attempt:
    """Agree with all other ranks on this attempt. All ranks must call this, or `refuse`.

    Args:
        store: torch's key-value store; keys of this function only.
        launch: which rank this process is.
        timeout_s: how long to wait for the last rank.

    Raises:
        ConfigError: on every rank, with the same line: a rank refused or did not come.
    """
    own = _come(store, launch.rank, reason="")
    until = time.monotonic() + timeout_s
    if launch.rank == 0:
        return _Leader(store, launch.world_size).lead(until)
    attempt = _follow(store, launch.rank, own, until + _LATE_S)
    if attempt is None:
        raise ConfigError(f"rank 0, which every rank of the job has to meet, has not come within {timeout_s:.0f} s")
    return attempt


def refuse(store: Any, launch: Launch, reason: str) -> None:
    """Instead of `meet`, on a rank that ends: the others raise its reason. Waits until rank 0 knows it, for at most 30 s."""
    own = _come(store, launch.rank, reason=one_line(reason))
    with suppress(ConfigError):
        if launch.rank == 0:
            _Leader(store, launch.world_size).lead(time.monotonic())
        else:
            _follow(store, launch.rank, own, time.monotonic() + _REFUSES_S)
    store.delete_key(_key(launch.rank))  # the next attempt must not find it


class _Leader:
    """Rank 0's part."""

    def __init__(self, store: Any, num_ranks: int) -> None:
        self._store, self._ranks = store, range(num_ranks)
        self._arrivals = -1
        self._words: dict[int, _Word] = {}

    def lead(self, until: float) -> Attempt:
        """Propose names until all have agreed to one. Raises ConfigError, after all that have come know why."""
        proposal, reason = _Proposal("", "", {}), ""
        while True:
            self._look()
            is_late = time.monotonic() > until
            if not reason:
                reason = self._refusal() or (self._missing(proposal.name) if is_late else "")
                if reason:
                    until, is_late = time.monotonic() + _LINGER_S, False
            words = {str(rank): each.word for rank, each in self._words.items()}
            is_complete = len(words) == len(self._ranks)
            if (words, reason) != (proposal.words, proposal.reason) and (reason or is_complete):
                proposal = _Proposal(proposal.name if proposal.reason else new_id(), reason, words)
                self._store.set("proposal", json.dumps(proposal))
            is_read = is_complete and self._store.check([_read(proposal.name, rank) for rank in self._ranks[1:]])
            if reason and (is_read or is_late):
                raise ConfigError(reason)
            if is_read:
                job = self._store.compare_set("job", "", proposal.name).decode()
                attempt = Attempt(proposal.name, job, self._store.add("attempts", 1) - 1)
                self._store.set(_agreed(proposal.name), json.dumps(attempt))
                return attempt
            time.sleep(_PAUSE_S)

    def _look(self) -> None:
        """Read what ranks have written, if there is something new."""
        arrivals = self._store.add("arrivals", 0)
        if arrivals != self._arrivals:
            self._arrivals = arrivals
            here = [rank for rank in self._ranks if self._store.check([_key(rank)])]
            texts = self._store.multi_get([_key(rank) for rank in here])
            self._words |= {rank: _Word(*json.loads(text)) for rank, text in zip(here, texts, strict=True)}

    def _refusal(self) -> str:
        for rank, word in self._words.items():
            if word.reason:
                return f"rank {rank} on {word.host} has ended before it joined the job: {word.reason}"
        return ""

    def _missing(self, name: str) -> str:
        """Ranks that have written nothing, or not answered to the proposal because their process is gone."""
        missing = [rank for rank in self._ranks[1:] if rank not in self._words]
        missing = missing or [rank for rank in self._ranks[1:] if not self._store.check([_read(name, rank)])]
        named = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        hosts = ", ".join(sorted({each.host for rank, each in self._words.items() if rank not in missing})[:8])
        return f"of {len(self._ranks)} ranks these have not come: {named}; the others are on {hosts}"


def _follow(store: Any, rank: int, own: str, until: float) -> Attempt | None:
    """The part of every other rank; None where rank 0 has not answered by then."""
    while time.monotonic() < until:
        proposal = _Proposal(*json.loads(store.get("proposal"))) if store.check(["proposal"]) else _Proposal("", "", {})
        if proposal.words.get(str(rank)) == own:
            store.set(_read(proposal.name, rank), "")
            if proposal.reason:
                raise ConfigError(proposal.reason)
            if store.check([_agreed(proposal.name)]):
                return Attempt(*json.loads(store.get(_agreed(proposal.name))))
        time.sleep(_PAUSE_S)
    return None


def _come(store: Any, rank: int, *, reason: str) -> str:
    """Write a new word for this process, and return it."""
    own = _Word(new_id(), socket.gethostname(), reason)
    store.set(_key(rank), json.dumps(own))
    store.add("arrivals", 1)
    return own.word


def new_id() -> str:
    """A text that no other call returns."""
    return uuid.uuid4().hex[:16]


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _read(name: str, rank: int) -> str:
    return f"read/{name}/{rank}"


def _agreed(name: str) -> str:
    return f"agreed/{name}"
