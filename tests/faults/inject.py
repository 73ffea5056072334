"""Faults that a rank of a real job does to itself at a moment: raise, SIGKILL, SIGSTOP, a cut link, a full disk, a slow rank.

Moments are named by what the rank reports to its `Watch`: a fault happens when it has entered a phase for the nth time, some
milliseconds later for those that come from outside. A cut link is a socket filter that drops every packet which arrives: neither
side sees a closed connection, as when a switch or a cable fails. A full disk is a limit on the size of files: every write fails,
with another error number. What these cannot show: a machine that loses its power.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PHASES = {
    "joins": "joins the job",
    "builds": "builds the model",
    "prepares": "prepares data",
    "first": "passes 1",
    "passes": "passes 3",
    "steps": "waits for other ranks in the optimizer step",
    "between": "between iterations 3",
    "saves": "saves the checkpoint",
    "evaluates": "evaluation 1",
    "ends": "ends the run",
    "leaves": "leaves the job",
}
"""Names of phases, and what the watch reports at their begin."""
ENVIRONMENT = "ZB_TEST_FAULT"
_LONGEST_S = 30.0
"""Seconds that a rank waits for a fault from outside."""


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and when."""

    kind: str
    """raise, kill, stop, cut, full or slow; or outside: the rank waits where it is until somebody else has done the fault."""
    rank: int
    phase: str
    """A key of PHASES."""
    after_ms: float
    """Milliseconds after the phase has begun."""
    note: str
    """File in which the rank writes the time and its process number when it happens; the number alone before one from outside."""

    def environment(self) -> dict[str, str]:
        """What the job's environment has to have."""
        return {ENVIRONMENT: json.dumps(asdict(self))}


class InjectedError(Exception):
    """The error of a fault of kind raise."""


def install(rank: int) -> None:
    """Make this process do the fault in the environment, if it is this rank's."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return
    fault = Fault(**json.loads(text))
    if fault.kind == "outside":
        with started(Path(fault.note), rank).open("a") as file:
            file.write("1")
    if fault.kind == "slow":
        _slow_down(fault, rank)
    elif fault.rank == rank:
        _Moments(fault).install()


class _Moments:
    """Sees what the watch reports, and does the fault when its moment has come."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._is_done = False
        self._timer: threading.Timer | None = None
        self._passes = {True: 0, False: 0}

    def install(self) -> None:
        from megatron.zerobubble.runtime.watch import Watch

        phase, passes, doing = Watch.phase, Watch.passes, Watch.doing

        @contextmanager
        def seen_phase(watch: Watch, text: str) -> Iterator[None]:
            with phase(watch, text):
                self._enter(text)
                yield
            if text == PHASES["ends"] and self._timer is not None:
                self._timer.cancel()  # the job is over: nobody listens any more to a process that is stopped while it exits

        @contextmanager
        def seen_passes(watch: Watch, *, forward_only: bool) -> Iterator[None]:
            self._passes[forward_only] += 1
            with passes(watch, forward_only=forward_only):
                self._enter(f"{'evaluation' if forward_only else 'passes'} {self._passes[forward_only]}")
                yield
            if not forward_only:
                self._enter(f"between iterations {self._passes[False]}")

        @contextmanager
        def seen_doing(watch: Watch, text: str) -> Iterator[None]:
            with doing(watch, text):
                if self._passes[False] == 3:
                    self._enter(text)
                yield

        Watch.phase, Watch.passes, Watch.doing = seen_phase, seen_passes, seen_doing  # type: ignore[method-assign]

    def _enter(self, text: str) -> None:
        if self._is_done or not text.startswith(PHASES[self._fault.phase]):
            return
        self._is_done = True
        if self._fault.kind in ("raise", "outside") or (self._fault.kind != "cut" and self._fault.after_ms == 0.0):
            self._do()
        else:
            self._timer = threading.Timer(self._fault.after_ms / 1000.0, self._do)
            self._timer.daemon = True
            self._timer.start()

    def _do(self) -> None:
        note = Path(self._fault.note)
        if self._fault.kind == "cut":
            while not (other := cut()):  # a rank that joins the job has no connection yet
                time.sleep(0.005)
            note.write_text(f"{time.time()} {os.getpid()} {other}")
            return
        if self._fault.kind == "outside":
            self._wait_for(note)
            return
        note.write_text(f"{time.time()} {os.getpid()}")
        if self._fault.kind == "raise":
            raise InjectedError("the injected failure")
        if self._fault.kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self._fault.kind])

    def _wait_for(self, note: Path) -> None:
        """Until the fault has been done; `done` says so. A rank that was started again has nothing to wait for."""
        if note.exists():
            return
        part = note.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(note)
        until = time.monotonic() + _LONGEST_S
        while not done(note).exists() and time.monotonic() < until:
            time.sleep(0.005)


def done(note: Path) -> Path:
    """The file that tells a rank that a fault from outside has been done."""
    return note.with_suffix(".done")


def started(note: Path, rank: int) -> Path:
    """The file with as many letters as a rank was started, in jobs whose fault comes from outside."""
    return note.with_suffix(f".rank{rank}")


def _slow_down(fault: Fault, rank: int) -> None:
    """Three times as slow: after each op the rank sleeps twice as long as the op took, within the op's time."""
    if fault.rank != rank:
        return
    from megatron.zerobubble.runtime.watch import Watch

    start, end, began = Watch.start, Watch.end, [0.0]

    def seen_start(watch: Watch, op: Any) -> None:
        start(watch, op)
        began[0] = time.perf_counter()

    def seen_end(watch: Watch, op: Any) -> None:
        time.sleep(2.0 * (time.perf_counter() - began[0]) + 0.02)
        end(watch, op)

    Watch.start, Watch.end = seen_start, seen_end  # type: ignore[method-assign]


def cut() -> str:
    """Drop all that arrives from one other rank, the first one that has a connection to this one; its rank, or nothing."""
    own = _sockets(os.getpid())
    for other in sorted(_children(os.getppid()) - {os.getpid()}):
        theirs = {local for local, _ in _sockets(other).values()}
        numbers = _inodes(os.getpid())
        shared = [numbers[inode] for inode, (_, remote) in own.items() if remote in theirs]
        if shared:
            for number in shared:
                drop_all(number)
            variables = Path(f"/proc/{other}/environ").read_text().split("\0")
            return next(each.partition("=")[2] for each in variables if each.startswith("RANK="))
    return ""


def _children(pid: int) -> set[int]:
    return {int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()}


def _sockets(pid: int) -> dict[str, tuple[str, str]]:
    """inode -> (local, remote address) of the established TCP connections of a process."""
    table = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01":
                table[fields[9]] = fields[1], fields[2]
    return {inode: table[inode] for inode in _inodes(pid) if inode in table}


def _inodes(pid: int) -> dict[str, int]:
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                found[target[8:-1]] = int(link.name)
    return found


def drop_all(descriptor: int) -> None:
    """A classic socket filter of one instruction, "accept 0 bytes"."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
