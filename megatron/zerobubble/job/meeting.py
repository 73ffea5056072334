"""All ranks of an attempt agree on its name, in a store where keys of earlier attempts remain.

torchrun ends and starts all ranks again when one of them dies or a host joins, and hosts one store for all of these attempts. Its
restart counts are no common name: an agent counts only failures of its own ranks. So each rank writes a word of its own, rank 0
proposes a name for the words of all ranks, and the name counts when every rank has found its own word in the proposal. A process
of an earlier attempt is in no proposal once another one has taken its rank.

A rank that ends before it has joined the job gives its reason here, and the others raise it.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.key_value_store import read_value, typed
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.messages import one_line

__all__ = ["Attempt", "meet", "refuse"]

_PAUSE_S = 0.05
"""Seconds between two looks at the store."""
_AGAIN_S = 1.0
"""Seconds after which a rank looks whether another process has written a word for its rank."""
_LINGER_S = 10.0
"""Seconds for which rank 0 gives the reason why the job ends to ranks that come late."""
_REFUSES_S = 30.0
"""Seconds for which a rank that ends waits until its reason is read."""
_LATE_S = 5.0
"""Seconds by which the others wait longer than rank 0, which knows who is missing."""

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of the launcher to run the job; the same on all ranks."""

    name: str
    """Tells its keys in the store from those of other attempts."""
    job: str
    """Id of the job, the same in all of its attempts."""
    number: int = 0
    """How many attempts there were before."""
    is_known: bool = True
    """Whether `job` is that of the attempts before; a new one is taken where it is lost with the store."""

    @property
    def is_restart(self) -> bool:
        """Whether an earlier attempt failed."""
        return self.number > 0

    @property
    def text(self) -> str:
        """The attempt in log lines."""
        return f"restart {self.number}"

    @classmethod
    def alone(cls) -> Attempt:
        """Of a job of one process."""
        return cls(name="alone", job=_new_word())


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
    words: dict  # type: ignore[type-arg]
    """Rank, as text -> the word of the process that this is about."""


def meet(store: Any, launch: Launch, *, timeout_s: float) -> Attempt:
    """Agree with all other ranks on this attempt. All ranks must call this, or `refuse`.

    Args:
        store: torch's key-value store; keys of this function only.
        launch: which rank this process is.
        timeout_s: how long to wait for the last rank.

    Raises:
        ConfigError: on every rank, with the same line: a rank refused or did not come.
    """
    own = _Word(_new_word(), socket.gethostname(), "")
    if launch.rank == 0:
        return _Leader(store, launch, own).lead(time.monotonic() + timeout_s)
    found = _follow(store, launch, own, time.monotonic() + timeout_s + _LATE_S)
    if found is None:
        raise ConfigError(f"rank 0, which every rank of the job has to meet, has not come within {timeout_s:.0f} s")
    return found


def refuse(store: Any, launch: Launch, reason: str) -> None:
    """Instead of `meet`, on a rank that ends: the others raise its reason. Waits until rank 0 knows it, for at most 30 s."""
    own = _Word(_new_word(), socket.gethostname(), one_line(reason))
    with suppress(ConfigError):
        if launch.rank == 0:
            _Leader(store, launch, own).lead(time.monotonic())
        else:
            _follow(store, launch, own, time.monotonic() + _REFUSES_S)
    store.delete_key(_key(launch.rank))  # the next attempt must not find it


class _Leader:
    """Rank 0's part.

    Args:
        store: as in `meet`.
        launch: which rank this is.
        own: its word.
    """

    def __init__(self, store: Any, launch: Launch, own: _Word) -> None:
        self._store, self._launch, self._own = store, launch, own
        self._ranks = range(launch.world_size)
        self._arrivals = -1
        self._words: dict[int, _Word] = {}

    def lead(self, until: float) -> Attempt:
        """Propose names until all have agreed to one. Raises ConfigError, after all that have come know why."""
        _arrive(self._store, 0, self._own)
        proposed: dict[int, str] = {}
        name = ""
        while True:
            self._look()
            refused = [(rank, each) for rank, each in self._words.items() if each.reason]
            if refused:
                self._end(_refusal(*refused[0]))
            words = {rank: each.word for rank, each in self._words.items()}
            if len(words) == self._launch.world_size:
                if words != proposed:
                    proposed, name = words, self._propose(words, reason="")
                if self._store.check([_came(name, rank) for rank in self._ranks[1:]]):
                    return self._agree(name)
            if time.monotonic() > until:
                self._end(self._missing(name))
            time.sleep(_PAUSE_S)

    def _look(self) -> None:
        """Read what ranks have written, if there is something new."""
        arrivals = self._store.add("arrivals", 0)
        if arrivals != self._arrivals:
            self._arrivals = arrivals
            here = [rank for rank in self._ranks if self._store.check([_key(rank)])]
            texts = self._store.multi_get([_key(rank) for rank in here])
            found = {rank: _read(text, f"the word of rank {rank}", _Word) for rank, text in zip(here, texts, strict=True)}
            self._words |= {rank: word for rank, word in found.items() if word is not None}

    def _propose(self, words: Mapping[int, str], *, reason: str) -> str:
        name = _new_word()
        proposal = _Proposal(name, reason, {str(rank): word for rank, word in words.items()})
        self._store.set("proposal", json.dumps(proposal._asdict()))
        return name

    def _agree(self, name: str) -> Attempt:
        before = self._store.add("attempts", 1) - 1
        number = max(before, self._launch.restart_count)
        job = self._store.compare_set("job", "", _new_word()).decode()
        attempt = Attempt(name=name, job=job, number=number, is_known=before > 0 or number == 0)
        self._store.set(_agreed(name), json.dumps(asdict(attempt)))
        return attempt

    def _end(self, reason: str) -> None:
        """Raise a reason, when all ranks know it, or those that have come by the end of a few seconds."""
        until, told = time.monotonic() + _LINGER_S, 0
        while time.monotonic() < until:
            self._look()
            if len(self._words) != told:
                told = len(self._words)
                self._propose({rank: each.word for rank, each in self._words.items()}, reason=reason)
            others = [_knows(each) for rank, each in self._words.items() if rank != 0]
            if told == self._launch.world_size and self._store.check(others):
                break
            time.sleep(_PAUSE_S)
        raise ConfigError(reason)

    def _missing(self, name: str) -> str:
        """Ranks that have written nothing, or not answered to the proposal because their process is gone."""
        missing = [rank for rank in self._ranks[1:] if rank not in self._words]
        missing = missing or [rank for rank in self._ranks[1:] if not self._store.check([_came(name, rank)])]
        named = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        hosts = ", ".join(sorted({each.host for rank, each in self._words.items() if rank not in missing})[:8])
        return f"of {self._launch.world_size} ranks these have not come: {named}; the others are on {hosts}"


def _follow(store: Any, launch: Launch, own: _Word, until: float) -> Attempt | None:
    """The part of every other rank; None where rank 0 has not answered by then."""
    agreed_to, looks = "", 0
    _arrive(store, launch.rank, own)
    while time.monotonic() < until:
        if store.check(["proposal"]):
            proposal = _read(store.get("proposal"), "the proposal", _Proposal)
            if proposal is not None and proposal.words.get(str(launch.rank)) == own.word:
                if proposal.reason:
                    store.set(_knows(own), "")
                    raise ConfigError(one_line(proposal.reason))
                if proposal.name != agreed_to:
                    agreed_to = proposal.name
                    store.set(_came(agreed_to, launch.rank), "")
                if store.check([_agreed(agreed_to)]):
                    return _read(store.get(_agreed(agreed_to)), "the attempt", Attempt)
        looks += 1
        if looks % int(_AGAIN_S / _PAUSE_S) == 0 and store.get(_key(launch.rank)) != json.dumps(own._asdict()).encode():
            _arrive(store, launch.rank, own)
        time.sleep(_PAUSE_S)
    return None


def _arrive(store: Any, rank: int, own: _Word) -> None:
    store.set(_key(rank), json.dumps(own._asdict()))
    store.add("arrivals", 1)


def _read(text: bytes, what: str, kind: Callable[..., Value]) -> Value | None:
    return read_value(text, what, lambda fields: typed(kind, fields))


def _refusal(rank: int, word: _Word) -> str:
    return f"rank {rank} on {word.host} has ended before it joined the job: {word.reason}"


def _new_word() -> str:
    return uuid.uuid4().hex[:16]


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _knows(own: _Word) -> str:
    return f"knows/{own.word}"


def _came(name: str, rank: int) -> str:
    return f"came/{name}/{rank}"


def _agreed(name: str) -> str:
    return f"agreed/{name}"
