"""What each rank publishes in the job's store, again and again: that it runs, what it is doing, and since when.

A rank whose heartbeats end is stopped, or gone with its machine. One whose heartbeats come and that makes no progress says where
it is.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.machine import process_state

__all__ = ["Beat", "is_gone", "own_start", "publish", "published", "this_host"]


class Beat(NamedTuple):
    """One heartbeat of a rank."""

    number: int
    """Number of this rank's heartbeats; a higher one is a newer one."""
    host: str
    """Its machine, as `this_host` names it."""
    pid: int
    """Its process number there."""
    start: str
    """When the process began, in the machine's own units, because numbers are used again; empty if unknown."""
    interval_s: float
    """Seconds from one heartbeat to the next, as intended."""
    doing: str | None
    """What it does, a predicate whose subject is the rank; None: it is outside of the calls that are watched."""
    place: str
    """Python function, file and line where its main thread is; empty if unknown."""
    still_s: float
    """For how many seconds `doing` has not changed."""
    is_waiting: bool
    """Whether what it does lasts until other ranks have done their part."""
    waits_for: int | None
    """The rank whose message it waits for, or which takes the message that it waits to have sent; None: nobody's."""
    is_last: bool = False
    """Whether this rank has ended its work, so that no more heartbeats come."""

    @property
    def process(self) -> str:
        """Its process, in messages."""
        return f"process {self.pid} on {self.host.split()[0]}"


def this_host() -> str:
    """Name and boot of this machine: the same for two processes that can see each other, and not for two containers."""
    found = ""
    with suppress(OSError):
        found = f" {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()}{found}"


def own_start() -> str:
    """When this process began; see `Beat.start`."""
    state = process_state(os.getpid())
    return "" if state is None else state.start


def publish(store: Store, rank: int, beat: Beat) -> None:
    """Put a rank's newest heartbeat into the store."""
    store.set(_key(rank), json.dumps(beat))


def published(store: Store, ranks: Iterable[int]) -> dict[int, Beat]:
    """The newest heartbeats of those ranks that have published any."""
    known = [rank for rank in ranks if store.check([_key(rank)])]
    texts = store.multi_get([_key(rank) for rank in known]) if known else []
    return {rank: Beat(*json.loads(text)) for rank, text in zip(known, texts, strict=True)}


def is_gone(beat: Beat) -> bool:
    """Whether a process of this machine is not there any more."""
    state = process_state(beat.pid)
    return bool(beat.start) and (state is None or state.start != beat.start or state.is_zombie)


def _key(rank: int) -> str:
    return f"beat/{rank}"
