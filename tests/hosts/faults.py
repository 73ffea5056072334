"""What can happen to hosts: kinds of faults with what is promised of each, and trials drawn of them."""

from __future__ import annotations

import importlib.util
import os
import random
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.faults.inject import PHASES
from tests.faults.lab import PROMISED_S
from tests.hosts.hosts import Hosts
from tests.hosts.warm import AHEAD, VERSION

_ERROR_S = 30.0
"""Seconds from the start of a job that a user's error ends."""


@dataclass(frozen=True)
class Layout:
    """Which ranks run where."""

    num_hosts: int
    ranks_per_host: int
    pipeline: int
    flags: tuple[str, ...]
    is_script: bool = False
    """Whether `zerobubble run` starts a script around Megatron-LM's loop, in place of the reference trainer."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.num_hosts * self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)


ZBV = ("--zero-bubble-v-schedule", "--enable-optimizer-post-validation")
LAYOUTS = {
    "2 hosts, p = 4": Layout(2, 2, 4, ("--enable-zero-bubble",)),
    "2 hosts, p = 2, 2 replicas": Layout(2, 2, 2, (*ZBV, "--layout-independent-dropout")),
    "4 hosts, p = 4": Layout(4, 1, 4, ("--enable-zero-bubble",)),
    "2 hosts, p = 4, zerobubble run": Layout(2, 2, 4, ("--cpu", "--enable-zero-bubble"), is_script=True),
}


@dataclass(frozen=True)
class Trial:
    """One fault in one job."""

    kind: str
    """A key of FAULTS."""
    phase: str
    """A key of PHASES; empty for what is there from the start."""
    layout: str
    rendezvous: str
    """torchrun's: c10d or static."""
    host: int
    rank: int
    """The one that enters the phase, on that host."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, and what is promised of it."""

    do: Callable[[Hosts, Trial, int], object] | None = None
    """Does it when the moment has come, given the process of the rank; None: it is there from the start."""
    begin: Callable[[Hosts, Trial], object] | None = None
    """Does it before the job starts."""
    flags: tuple[str, ...] = ()
    """Of the job, on the host of the fault alone."""
    lacks: str | None = None
    """The flag of a file that all other hosts have in a folder of their own."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """In the environment of that host."""
    memory: str | None = None
    """Size of its /dev/shm."""
    temporary: str | None = None
    """Size of its folder for temporary files."""
    is_cut: bool = False
    """Whether hosts lose each other, so that each side can name only the other one."""
    is_gone: bool = False
    """Whether the host of the fault does not survive it."""
    ends_well: bool = False
    is_cold: bool = False
    """Whether ranks are not forked: how a process was started is read from /proc, and there a fork has its parent's variables."""
    max_restarts: int = 0
    """torchrun's. The job goes on by itself after one restart."""
    is_elastic: bool = False
    """Whether the job may go on with fewer hosts, with losses that only another order of sums changes."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a trial that are not drawn."""
    promised_s: float = PROMISED_S

    @property
    def may_keep_agents(self) -> bool:
        """Whether torchrun may stay on a host that lost the one of its store."""
        return (self.is_cut or self.is_gone) and not self.max_restarts

    @property
    def is_error(self) -> bool:
        """Whether it is an error of the user."""
        return self.do is None and not self.ends_well


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _lose_power(hosts: Hosts, trial: Trial, pid: int) -> None:
    hosts.link(trial.host, is_up=False)
    hosts.kill(trial.host)


_SPACE = 2**16
"""Bytes that a file may have on a full disk: more than the output of a rank, less than a checkpoint."""


def _fill(hosts: Hosts, trial: Trial, pid: int) -> None:
    """The host's ranks can write no checkpoint from now on."""
    for rank in hosts.ranks(trial.host):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (_SPACE, resource.RLIM_INFINITY))


FAULTS = {
    "one rank killed": Kind(do=lambda hosts, trial, pid: _send([pid], signal.SIGKILL)),
    "all ranks of a host killed": Kind(do=lambda hosts, trial, pid: _send(hosts.ranks(trial.host), signal.SIGKILL)),
    "one rank killed, restarts": Kind(do=lambda hosts, trial, pid: _send([pid], signal.SIGKILL), ends_well=True, max_restarts=3),
    "all ranks of a host killed, restarts": Kind(
        do=lambda hosts, trial, pid: _send(hosts.ranks(trial.host), signal.SIGKILL), ends_well=True, max_restarts=3
    ),
    "a rank stopped": Kind(do=lambda hosts, trial, pid: _send([pid], signal.SIGSTOP), is_cold=True),
    "a host killed": Kind(do=lambda hosts, trial, pid: hosts.kill(trial.host), is_gone=True),
    "a host killed, elastic": Kind(
        do=lambda hosts, trial, pid: hosts.kill(trial.host),
        is_gone=True,
        ends_well=True,
        max_restarts=3,
        is_elastic=True,
        only={"layout": "2 hosts, p = 2, 2 replicas", "host": 1, "rendezvous": "c10d"},
    ),
    "power lost": Kind(do=_lose_power, is_gone=True),
    "link down": Kind(do=lambda hosts, trial, pid: hosts.link(trial.host, is_up=False), is_cut=True),
    "halves cut apart": Kind(
        do=lambda hosts, trial, pid: hosts.split(side_of(trial)), is_cut=True, only={"layout": "4 hosts, p = 4"}
    ),
    "nothing that a host sends arrives": Kind(do=lambda hosts, trial, pid: hosts.mute(trial.host), is_cut=True),
    "disk full": Kind(do=_fill, only={"phase": "saves"}),
    "slow link": Kind(begin=lambda hosts, trial: hosts.slow(trial.host, 2.0), ends_well=True),
    # Where every host reads batches, and more of them at once than fit.
    "small /dev/shm": Kind(memory="64k", flags=("--num-workers", "2"), only={"layout": "2 hosts, p = 4"}),
    "small folder for temporary files": Kind(temporary="64k", ends_well=True),
    "clock an hour ahead": Kind(variables={AHEAD: "3600"}, ends_well=True),
    "a flag that no rank knows": Kind(flags=("--no-such-flag",), promised_s=_ERROR_S),
    "another learning rate": Kind(flags=("--lr", "2e-2"), promised_s=_ERROR_S),
    "another version of torch": Kind(variables={VERSION: "2.0.1"}, promised_s=_ERROR_S),
    "no dataset": Kind(lacks="--data-path", promised_s=_ERROR_S),
    "no checkpoint": Kind(lacks="--load", promised_s=_ERROR_S),
    "no plan": Kind(lacks="--zero-bubble-load-plan", promised_s=_ERROR_S),
}
"""What happens to one host, by name."""


def side_of(trial: Trial) -> set[int]:
    """The hosts of the fault."""
    if trial.kind != "halves cut apart":
        return {trial.host}
    half = LAYOUTS[trial.layout].num_hosts // 2
    return set(range(half)) if trial.host < half else set(range(half, 2 * half))


def draw(kind: str, generator: random.Random) -> Trial:
    """A trial of a kind of fault."""
    only, is_timed = FAULTS[kind].only, FAULTS[kind].do is not None
    has_script = is_timed and "phase" not in only and importlib.util.find_spec("megatron.training") is not None
    layout = only.get("layout") or generator.choice([name for name in LAYOUTS if has_script or not LAYOUTS[name].is_script])
    phases = ["first", "passes", "evaluates"] if LAYOUTS[layout].is_script else list(PHASES)
    host = only.get("host", generator.randrange(LAYOUTS[layout].num_hosts))
    return Trial(
        kind=kind,
        phase=only.get("phase") or generator.choice(phases) if is_timed else "",
        layout=layout,
        rendezvous=only.get("rendezvous") or generator.choice(["c10d", "static"]),
        host=host,
        rank=generator.choice(LAYOUTS[layout].ranks_of(host)),
    )
