"""What a rank says about itself in the job's store, again and again: that it runs, what it is doing, and since when.

A process that is stopped, or whose machine is gone, says nothing more in any of its phases; so the others can tell which rank
it is. One that says something but makes no progress says where it is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.job.tcp_connections import Connections
from megatron.zerobubble.machine import process_state

__all__ = ["Beat", "Process", "departed", "kill", "publish", "published", "this_process"]


@dataclass(frozen=True, kw_only=True)
class Process:
    """Where a rank runs."""

    host: str
    """Name and boot of its machine, the same for two processes that can send each other signals."""
    pid: int
    """Its process number there."""
    born: str
    """When the process began, in the machine's own units, because numbers are used again; empty if unknown."""
    error_file: str | None
    """Where torchrun expects the reason of its failure; None without torchrun."""


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


def this_process(error_file: str | None) -> Process:
    """Where this rank runs.

    Args:
        error_file: where torchrun expects the reason of its failure.
    """
    return Process(host=f"{socket.gethostname()}{_boot()}", pid=os.getpid(), born=_start(os.getpid()), error_file=error_file)


def kill(process: Process) -> bool:
    """Kill a process of this machine that does not answer; SIGTERM would wait in one that is stopped. Whether it was there."""
    if not process.born or _start(process.pid) != process.born or process.host != this_process(None).host:
        return False
    with suppress(OSError):
        os.kill(process.pid, signal.SIGKILL)
        return True
    return False


def publish(store: Store, rank: int, beat: Beat) -> None:
    """Put a rank's newest beat into the store."""
    store.set(_key(rank), json.dumps(asdict(beat)))


def published(store: Store, ranks: Iterable[int]) -> dict[int, Beat]:
    """The newest beats of those ranks that have published any."""
    known = [rank for rank in ranks if store.check([_key(rank)])]
    beats = {}
    for rank, text in zip(known, store.multi_get([_key(rank) for rank in known]), strict=True) if known else ():
        fields = json.loads(text)
        connections = Connections(**{name: tuple(ends) for name, ends in fields["connections"].items()})
        beats[rank] = Beat(**fields | {"process": Process(**fields["process"]), "connections": connections})
    return beats


def departed(store: Store, world_size: int) -> dict[int, Beat]:
    """The last beats of ranks of this machine whose processes are gone before their work ended."""
    here = this_process(None).host
    beats = published(store, range(world_size))
    return {
        rank: beat for rank, beat in beats.items() if beat.process.host == here and not beat.is_last and _is_gone(beat.process)
    }


def _is_gone(process: Process) -> bool:
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


def _start(pid: int) -> str:
    state = process_state(pid)
    return "" if state is None else state.start
