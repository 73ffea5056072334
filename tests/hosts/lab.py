"""Trials of the laboratory of hosts: one fault of hosts in one job, and what came of it on each host.

A trial is drawn from a seed. Its job is the one of `tests.faults`, one torchrun on each host. The rank of the fault enters the
phase and waits there while the fault is done from outside.
"""

from __future__ import annotations

import functools
import os
import random
import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.zerobubble.cli import checkpoint
from megatron.zerobubble.cli.main import main
from tests.faults import lab
from tests.faults.inject import PHASES, Fault, done
from tests.hosts.hosts import LOCAL, Agent, Hosts
from tests.hosts.warm import AHEAD, VERSION
from tests.support.datasets import random_documents, write_documents
from tests.training.launch import launch_warm

LONGEST_S = 150.0
"""Seconds from a fault after which a job hangs, and what is left is counted and killed."""
_JOB_S = 120.0
"""Seconds that a job may take to come to its fault."""
PROMISED_S = lab.PROMISED_S
ERROR_S = 30.0
"""The same from the start of a job that a user's error ends."""
_AGENTS_S = 20.0
"""Seconds that torchrun may stay on a host when all ranks, and torchrun of another host, have ended."""
_PORT = 29400


@dataclass(frozen=True)
class Layout:
    """Which ranks run where."""

    num_hosts: int
    ranks_per_host: int
    pipeline: int
    flags: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.num_hosts * self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)


_ZBV = ("--zero-bubble-v-schedule", "--enable-optimizer-post-validation")
LAYOUTS = {
    "2 hosts, p = 4": Layout(2, 2, 4, ("--enable-zero-bubble",)),
    "2 hosts, p = 2, 2 replicas": Layout(2, 2, 2, _ZBV),
    "4 hosts, p = 4": Layout(4, 1, 4, ("--enable-zero-bubble",)),
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


@dataclass(frozen=True)
class OnHost:
    """What came of a job on one host."""

    rank_s: float | None
    """Seconds from the fault to the end of its last rank; None: one is left."""
    agent_s: float | None
    """The same of torchrun."""
    code: int | None
    """torchrun's exit code."""
    first: str
    """The first line about the failure."""
    last: str
    is_named: bool | None
    """Whether the first line names the culprit; None: it need not, as on a host that is gone."""


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    trial: Trial
    hosts: tuple[OnHost, ...]
    num_left: int
    """Ranks that are still there after LONGEST_S."""
    num_restarts: int
    """By torchrun, as ranks count them."""
    resumed_at: int
    """Iteration of the newest checkpoint, from which the job went on; 0: there was none yet."""
    has_same_losses: bool
    """Whether the job, started again where it failed, has the losses of the undisturbed one, bit for bit."""
    has_whole_checkpoints: bool

    @property
    def is_hang(self) -> bool:
        """Whether a rank had not ended after LONGEST_S, or torchrun on a host that lost no other one."""
        kind = FAULTS[self.trial.kind]
        return any(host.rank_s is None or (host.agent_s is None and not (kind.is_cut or kind.is_gone)) for host in self.hosts)

    @property
    def seconds(self) -> float:
        """To the end of the last rank."""
        return max(LONGEST_S if host.rank_s is None else host.rank_s for host in self.hosts)

    @property
    def is_as_promised(self) -> bool:
        """All promises but the time."""
        ends_well = all(host.code == 0 for host in self.hosts)
        kind = FAULTS[self.trial.kind]
        ended = ends_well == kind.ends_well and self.num_restarts == (1 if kind.max_restarts else 0)
        is_whole = self.has_same_losses and self.has_whole_checkpoints and self.num_left == 0
        return ended and is_whole and not self.is_hang and all(host.is_named in (True, None) for host in self.hosts)


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
    max_restarts: int = 0
    """torchrun's. The job goes on by itself after one restart."""
    num_hosts: int = 2
    """At least."""
    promised_s: float = PROMISED_S

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


def _fill(hosts: Hosts, trial: Trial, pid: int) -> None:
    """Every write of the host's ranks fails from now on."""
    for rank in hosts.ranks(trial.host):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


FAULTS = {
    "one rank killed": Kind(do=lambda hosts, trial, pid: _send([pid], signal.SIGKILL)),
    "all ranks of a host killed": Kind(do=lambda hosts, trial, pid: _send(hosts.ranks(trial.host), signal.SIGKILL)),
    "one rank killed, restarts": Kind(do=lambda hosts, trial, pid: _send([pid], signal.SIGKILL), ends_well=True, max_restarts=3),
    "all ranks of a host killed, restarts": Kind(
        do=lambda hosts, trial, pid: _send(hosts.ranks(trial.host), signal.SIGKILL), ends_well=True, max_restarts=3
    ),
    "a rank stopped": Kind(do=lambda hosts, trial, pid: _send([pid], signal.SIGSTOP)),
    "a host killed": Kind(do=lambda hosts, trial, pid: hosts.kill(trial.host), is_gone=True),
    "power lost": Kind(do=_lose_power, is_gone=True),
    "link down": Kind(do=lambda hosts, trial, pid: hosts.link(trial.host, is_up=False), is_cut=True),
    "halves cut apart": Kind(do=lambda hosts, trial, pid: hosts.split(_side(trial)), is_cut=True, num_hosts=4),
    "nothing that a host sends arrives": Kind(do=lambda hosts, trial, pid: hosts.mute(trial.host), is_cut=True),
    "disk full": Kind(do=_fill),
    "slow link": Kind(begin=lambda hosts, trial: hosts.slow(trial.host, 2.0), ends_well=True),
    "small /dev/shm": Kind(memory="64k", flags=("--num-workers", "2"), ends_well=True),
    "small folder for temporary files": Kind(temporary="64k", ends_well=True),
    "clock an hour ahead": Kind(variables={AHEAD: "3600"}, ends_well=True),
    "a flag that no rank knows": Kind(flags=("--no-such-flag",), promised_s=ERROR_S),
    "another learning rate": Kind(flags=("--lr", "2e-2"), promised_s=ERROR_S),
    "another version of torch": Kind(variables={VERSION: "2.0.1"}, promised_s=ERROR_S),
    "no dataset": Kind(lacks="--data-path", promised_s=ERROR_S),
    "no checkpoint": Kind(lacks="--load", promised_s=ERROR_S),
    "no plan": Kind(lacks="--zero-bubble-load-plan", promised_s=ERROR_S),
}
"""What happens to one host, by name."""
PHASES_OF = {"disk full": ["saves"]}
"""Where not all of them."""


def _side(trial: Trial) -> set[int]:
    """The hosts of the fault."""
    if trial.kind != "halves cut apart":
        return {trial.host}
    half = LAYOUTS[trial.layout].num_hosts // 2
    return set(range(half)) if trial.host < half else set(range(half, 2 * half))


def drawn(seed: str) -> Trial:
    """The trial of a seed."""
    generator = random.Random(seed)
    return draw(generator.choice(list(FAULTS)), generator)


def draw(kind: str, generator: random.Random) -> Trial:
    """A trial of a kind of fault."""
    fault = FAULTS[kind]
    name = generator.choice([name for name, layout in LAYOUTS.items() if layout.num_hosts >= fault.num_hosts])
    host = generator.randrange(LAYOUTS[name].num_hosts)
    return Trial(
        kind=kind,
        phase="" if fault.do is None else generator.choice(PHASES_OF.get(kind, list(PHASES))),
        layout=name,
        rendezvous=generator.choice(["c10d", "static"]),
        host=host,
        rank=generator.choice(LAYOUTS[name].ranks_of(host)),
    )


def run(trial: Trial, folder: Path) -> Outcome | None:
    """Run a job with the fault, then let it go on without, on one host. None: the job was over before the moment of the fault."""
    layout, kind, note = LAYOUTS[trial.layout], FAULTS[trial.kind], folder / "note"
    sizes = [{trial.host: size} if size else {} for size in (kind.memory, kind.temporary)]
    with Hosts(layout.num_hosts, folder, memory=sizes[0], temporary=sizes[1]) as hosts:
        if kind.begin is not None:
            kind.begin(hosts, trial)
        agents = []
        for host in range(layout.num_hosts):
            variables = Fault("outside", trial.rank, trial.phase, 0.0, str(note)).environment() if trial.phase else {}
            variables |= kind.variables if host == trial.host else {}
            job = [str(lab.JOB), *_flags(folder, layout, kind, is_at_fault=host == trial.host)]
            if kind.lacks and host != trial.host:
                _give(kind.lacks, folder / hosts.names[host], trial)
            agents.append(hosts.start(host, [*_torchrun(trial, host, folder.name), *job], variables))
        watched = _watch(hosts, trial, agents, note)
    if watched is None:
        assert lab.losses_of(folder) == undisturbed(trial.layout), "a fault that happened to nobody changes nothing"
        return None
    on_hosts, num_left = watched
    resumed_at, losses = lab.go_on(folder, _flags(folder, layout), layout.num_ranks, launch_warm)
    return Outcome(
        trial=trial,
        hosts=on_hosts,
        num_left=num_left,
        num_restarts=max(int(each) for agent in agents for each in ["0", *re.findall(r"restart (\d+):", agent.screen)]),
        resumed_at=resumed_at,
        has_same_losses=losses == undisturbed(trial.layout),
        has_whole_checkpoints=checkpoint.main(["verify", str(folder / "saved")]) == 0,
    )


def _torchrun(trial: Trial, host: int, name: str) -> list[str]:
    layout, max_restarts = LAYOUTS[trial.layout], FAULTS[trial.kind].max_restarts
    common = [
        f"--nnodes={layout.num_hosts}",
        f"--nproc-per-node={layout.ranks_per_host}",
        f"--max-restarts={max_restarts}",
    ]
    if trial.rendezvous == "static":
        return [*common, f"--node-rank={host}", "--master-addr=node0", f"--master-port={_PORT}"]
    return [*common, "--rdzv-backend=c10d", f"--rdzv-endpoint=node0:{_PORT}", f"--rdzv-id={name}"]


def _watch(hosts: Hosts, trial: Trial, agents: list[Agent], note: Path) -> tuple[tuple[OnHost, ...], int] | None:
    """Do the fault when its moment has come, and wait for the end; (what came of it on each host, ranks that are left).

    torchrun itself may stay on a host that has lost the others, and is waited for only a little longer than its ranks.
    """
    do, begin = FAULTS[trial.kind].do, time.time()
    moment = begin if do is None else 0.0
    seen = [begin for _ in agents]  # when each host last had a rank
    while True:
        now = time.time()
        left = [hosts.ranks(host) for host in range(hosts.num)]
        seen = [now if left[host] else seen[host] for host in range(hosts.num)]
        if do is not None and not moment and note.exists():
            do(hosts, trial, hosts.find(trial.host, int(note.read_text())))
            moment = time.time()
            done(note).touch()
        has_ended = all(agent.outcome for agent in agents) and not any(left)
        is_late = now > (moment + LONGEST_S if moment else begin + _JOB_S)
        if has_ended or is_late or (moment and any(agent.outcome for agent in agents) and now > max(seen) + _AGENTS_S):
            break
        time.sleep(0.05)
    if not moment:
        assert has_ended, f"{trial} did not begin\n" + "\n".join(agent.screen for agent in agents)
        return None
    ended = [None if left[host] else seen[host] - moment for host in range(hosts.num)]
    return tuple(_on_host(trial, host, agent, ended[host], moment) for host, agent in enumerate(agents)), sum(map(len, left))


_FAILURE = re.compile(
    r"^(?:stuck: |error: |rank \d+ (?:failed|stops|lost)|ranks were not given|[\w./ -]+: error: ).*", re.MULTILINE
)
"""A line of ours about a failure."""
_ROOT = re.compile(r"^Root Cause.*?^ +rank +: (\d+) .*?^ +traceback : (.*?)$", re.MULTILINE | re.DOTALL)
"""torchrun's report: a rank, and its reason."""
_OWN = re.compile(r"^rank \d+ (?:stops|lost)[^:]*: ")
"""What a rank says of itself before it names another one."""
_STORE = re.compile(r"store.*(?:MASTER_ADDR|node0)|lost the job's store")


def _on_host(trial: Trial, host: int, agent: Agent, rank_s: float | None, moment: float) -> OnHost:
    lines = [found[0] for found in _FAILURE.finditer(agent.screen)]
    root = _ROOT.search(agent.screen)
    if root is not None:
        lines.append(f"rank {root[1]}: {root[2]}" if root[2].startswith("Signal ") else root[2])
    outcome = agent.outcome
    return OnHost(
        rank_s=None if rank_s is None else round(rank_s, 1),
        agent_s=None if outcome is None else round(outcome[0] - moment, 1),
        code=None if outcome is None else outcome[1],
        first=lines[0] if lines else "",
        last=lines[-1] if lines else "",
        is_named=_is_named(trial, host, lines),
    )


def _is_named(trial: Trial, host: int, lines: list[str]) -> bool | None:
    """Whether the reason that a host's user reads last is the right one, and no rank that lost another one is blamed before."""
    kind, layout = FAULTS[trial.kind], LAYOUTS[trial.layout]
    if kind.ends_well or (kind.is_gone and host == trial.host):
        return None
    blamed = [line for line in lines if re.match(r"rank \d+ failed", line)] + lines[-1:]
    if kind.is_error and host == trial.host:
        return bool(blamed)
    side, everybody = _side(trial), set(range(layout.num_hosts))
    culprits = everybody - side if kind.is_cut and host in side else side
    ranks = {rank for each in culprits for rank in layout.ranks_of(each)}
    if trial.kind in ("one rank killed", "a rank stopped"):
        ranks = {trial.rank}
    return bool(blamed) and all(_names(line, culprits, ranks) for line in blamed)


def _names(line: str, hosts: set[int], ranks: set[int]) -> bool:
    reason = _OWN.sub("", line)
    found = re.search(r"ranks? (\d+)(?: and (\d+))?", reason)
    named = {int(each) for each in found.groups() if each is not None} if found else set()
    has_store = 0 in hosts and _STORE.search(reason) is not None
    return has_store or bool(named & ranks) or any(f"node{host}" in reason for host in hosts)


def _flags(folder: Path, layout: Layout, kind: Kind | None = None, *, is_at_fault: bool = False) -> list[str]:
    flags = lab.flags_of(folder, list(layout.flags), layout.pipeline)
    if kind is not None and kind.lacks == "--data-path":
        flags.remove("--mock-data")
    lacks = [] if kind is None or kind.lacks is None else [kind.lacks, str(LOCAL / _NAMES[kind.lacks])]
    return [*flags, *lacks, *(kind.flags if kind is not None and is_at_fault else ())]


_NAMES = {"--data-path": "text", "--load": "saved", "--zero-bubble-load-plan": "plan.json"}


def _give(flag: str, local: Path, trial: Trial) -> None:
    """Put the file of a flag into a folder."""
    layout = LAYOUTS[trial.layout]
    if flag == "--data-path":
        write_documents(local / "text", random_documents([40] * 20))
    elif flag == "--load":
        _undisturbed_in(local, trial.layout)
    else:
        schedule = "zbv" if layout.flags == _ZBV else "zb-h1"
        plan = [
            "--schedule",
            schedule,
            "--num-ranks",
            str(layout.pipeline),
            "--num-microbatches",
            str(4 * layout.pipeline // layout.num_ranks),
            "--json",
        ]
        assert main(["plan", *plan, str(local / "plan.json")]) == 0


@functools.cache
def undisturbed(layout: str) -> dict[int, float]:
    """The losses of a job without a fault."""
    with tempfile.TemporaryDirectory() as name:
        return _undisturbed_in(Path(name), layout)


def _undisturbed_in(folder: Path, name: str) -> dict[int, float]:
    layout = LAYOUTS[name]
    return lab.go_on(folder, _flags(folder, layout), layout.num_ranks, launch_warm)[1]
