"""What a rank says about itself in the job's store, again and again: that it runs, what it is doing, and since when.

A process that is stopped, or whose machine is gone, says nothing more in any of its phases; so the others can tell which rank
it is. One that says something but makes no progress says where it is.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.zerobubble.job.key_value_store import Store, read_value, typed
from megatron.zerobubble.job.tcp_connections import Connections
from megatron.zerobubble.machine import process_state

__all__ = ["Beat", "Process", "is_gone", "publish", "published", "this_process"]


@dataclass(frozen=True, kw_only=True)
class Process:
    """Where a rank runs, by its own account: for messages, and never to send it a signal."""

    host: str
    """Name and boot of its machine, the same for two processes that can see each other."""
    pid: int
    """Its process number there."""
    born: str
    """When the process began, in the machine's own units, because numbers are used again; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One message of a rank about itself."""

    count: int
    """Number of this rank's beats; a higher one is a newer one."""
    process: Process
    doing: str | None
    """What it does, a predicate whose subject is the rank; None: nothing is known."""
    place: str
    """Python function, file and line where its main thread is; empty if unknown."""
    is_waiting: bool
    """Whether it waits for another rank."""
    waits_for: int | None
    """The rank whose message it waits for, or which takes the message that it waits to have sent; None: nobody's."""
    is_shared: bool
    """Whether other ranks take part in what it does, or nothing is known of it, so that it may last because of them."""
    still_s: float
    """For how many seconds `doing` has not changed."""
    silence_of_next_s: float
    """For how many seconds it has not heard of the next rank."""
    interval_s: float
    """Seconds from one beat to the next, as intended."""
    busy_s: float
    """Time of all its ops so far, in seconds."""
    num_iterations: int
    """Training iterations that it has begun."""
    connections: Connections = field(default_factory=Connections)
    """Its connections, once it has waited for long."""
    is_last: bool = False
    """Whether this rank has ended its work, so that no more beats come."""

    @property
    def depends_on_others(self) -> bool:
        """Whether what it does may last because of other ranks. Where nothing is known of what it does: no."""
        return self.doing is not None and (self.is_waiting or self.is_shared)


def this_process() -> Process:
    """Where this rank runs."""
    state = process_state(os.getpid())
    born = "" if state is None else state.start
    return Process(host=f"{socket.gethostname()}{_boot()}", pid=os.getpid(), born=born)


def publish(store: Store, rank: int, beat: Beat) -> None:
    """Put a rank's newest beat into the store."""
    store.set(_key(rank), json.dumps(asdict(beat)))


def published(store: Store, ranks: Iterable[int]) -> dict[int, Beat]:
    """The newest beats of those ranks that have published any."""
    known = [rank for rank in ranks if store.check([_key(rank)])]
    beats = {}
    for rank, text in zip(known, store.multi_get([_key(rank) for rank in known]), strict=True) if known else ():
        beat = read_value(text, f"the heartbeat of rank {rank}", _beat)
        if beat is not None:
            beats[rank] = beat
    return beats


def _beat(fields: Any) -> Beat:
    connections = Connections(**{name: tuple(map(str, ends)) for name, ends in fields["connections"].items()})
    process = typed(Process, fields["process"])
    if not process.host.split():
        raise ValueError("host")
    return typed(Beat, fields | {"process": process, "connections": connections})


def is_gone(process: Process) -> bool:
    """Whether a process of this machine is not there any more."""
    state = process_state(process.pid)
    return bool(process.born) and (state is None or state.start != process.born or state.is_zombie)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _boot() -> str:
    """Tells containers and machines of one name apart."""
    found = ""
    with suppress(OSError):
        found = f" {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return found
