"""Trials of the laboratory of hosts: one fault of hosts in one job, and what came of it on each host.

The job is the one of `tests.faults`, one torchrun on each host. The rank of the fault enters the
phase and waits there while the fault is done from outside.
"""

from __future__ import annotations

import functools
import math
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.zerobubble.cli import checkpoint
from megatron.zerobubble.cli.main import main
from tests.faults import lab
from tests.faults.inject import Fault, done, started
from tests.hosts.faults import FAULTS, LAYOUTS, ZBV, Kind, Layout, Trial, side_of
from tests.hosts.hosts import LOCAL, Agent, Hosts
from tests.support.datasets import random_documents, write_documents
from tests.support.megatron_lm import SMALL, WITHOUT_KERNELS, logged
from tests.training.launch import ROOT, launch_warm

LONGEST_S = 200.0
"""Seconds from a fault after which a job hangs, and what is left is counted and killed."""
_JOB_S = 300.0
"""Seconds that a job may take to come to its fault."""
_AGENTS_S = 20.0
"""Seconds that torchrun is waited for, when all ranks have ended, on a host that has lost the others."""
_PORT = 29400
_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Megatron-LM asks for it."""

Losses = dict[Any, Any]
"""By iteration."""


@dataclass(frozen=True)
class OnHost:
    """What came of a job on one host."""

    rank_s: float | None
    """Seconds from the fault, or the start of the job, to the end of its last rank; None: one is left."""
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
    def _alive(self) -> list[OnHost]:
        is_gone = FAULTS[self.trial.kind].is_gone
        return [each for host, each in enumerate(self.hosts) if not (is_gone and host == self.trial.host)]

    @property
    def is_hang(self) -> bool:
        """Whether a rank had not ended after LONGEST_S, or torchrun on a host that lost no other one."""
        agents_too = not FAULTS[self.trial.kind].may_keep_agents
        return any(host.rank_s is None or (host.agent_s is None and agents_too) for host in self._alive)

    @property
    def seconds(self) -> float:
        """To the end of the last rank."""
        return max(LONGEST_S if host.rank_s is None else host.rank_s for host in self.hosts)

    @property
    def is_as_promised(self) -> bool:
        """All promises but the time."""
        kind = FAULTS[self.trial.kind]
        ends_well = all(host.code == 0 for host in self._alive)
        ended = ends_well == kind.ends_well and self.num_restarts == (1 if kind.max_restarts else 0)
        is_whole = self.has_same_losses and self.has_whole_checkpoints and self.num_left == 0
        return ended and is_whole and not self.is_hang and all(host.is_named in (True, None) for host in self.hosts)


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
            variables |= _VARIABLES | (kind.variables if host == trial.host else {})
            job = job_of(folder, layout, kind, is_at_fault=host == trial.host)
            if kind.lacks and host != trial.host:
                _give(kind.lacks, folder / hosts.names[host], trial)
            agents.append(hosts.start(host, [*torchrun(trial, host, folder.name), *job], variables, is_cold=kind.is_cold))
        watched = _watch(hosts, trial, agents, note)
    said = "".join(agent.screen for agent in agents)
    if watched is None:
        assert _losses(folder, layout, said) == undisturbed(trial.layout), "a fault that happened to nobody changes nothing"
        return None
    on_hosts, num_left = watched
    files = [file for rank in range(layout.num_ranks) if (file := started(note, rank)).exists()]
    resumed_at = _saved(folder)
    losses = _go_on(folder, layout, said)
    return Outcome(
        trial=trial,
        hosts=on_hosts,
        num_left=num_left,
        num_restarts=max(len(file.read_text()) - 1 for file in files) if files else 0,
        resumed_at=resumed_at,
        has_same_losses=_are_same(losses, undisturbed(trial.layout), kind),
        has_whole_checkpoints=layout.is_script or checkpoint.main(["verify", str(folder / "saved")]) == 0,
    )


def _are_same(losses: Losses, expected: Losses, kind: Kind) -> bool:
    """Bit for bit, but for a job that goes on with fewer replicas: those add in another order."""
    if kind.is_elastic:
        return losses.keys() == expected.keys() and all(
            math.isclose(losses[each], expected[each], rel_tol=1e-4) for each in losses
        )
    return losses == expected


def _saved(folder: Path) -> int:
    tracker = folder / "saved" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def _losses(folder: Path, layout: Layout, said: str) -> Losses:
    """What the job wrote; of a script the gradient norms and validation losses that it printed."""
    if layout.is_script:  # the second loss that Megatron-LM's loop prints after a start is its mean with the first one
        return {where: values[-1] for where, values in logged(said).items()}
    return lab.losses_of(folder)


def _go_on(folder: Path, layout: Layout, said: str = "") -> Losses:
    """Start the job on one host, again or for the first time; its losses, with those that it had `said`."""
    script, *flags = job_of(folder, layout)
    with mock.patch.dict("os.environ", _VARIABLES):
        ended = launch_warm(flags, num_ranks=layout.num_ranks, script=Path(script))
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return _losses(folder, layout, said + ended.stdout)


def torchrun(trial: Trial, host: int, name: str, *, max_restarts: int | None = None) -> list[str]:
    """The start of the command on a host. Restarts: by default those of the kind of fault."""
    layout, kind = LAYOUTS[trial.layout], FAULTS[trial.kind]
    max_restarts = kind.max_restarts if max_restarts is None else max_restarts
    num_hosts = f"1:{layout.num_hosts}" if kind.is_elastic else layout.num_hosts
    common = [f"--nnodes={num_hosts}", f"--nproc-per-node={layout.ranks_per_host}", f"--max-restarts={max_restarts}"]
    if trial.rendezvous == "static":
        return [*common, f"--node-rank={host}", "--master-addr=node0", f"--master-port={_PORT}"]
    return [*common, "--rdzv-backend=c10d", f"--rdzv-endpoint=node0:{_PORT}", f"--rdzv-id={name}"]


def _watch(hosts: Hosts, trial: Trial, agents: list[Agent], note: Path) -> tuple[tuple[OnHost, ...], int] | None:
    """Do the fault when its moment has come, and wait for the end; (what came of it on each host, ranks that are left).

    torchrun itself may stay on a host that has lost the others (with c10d, for minutes); it is not waited for.
    """
    kind, begin = FAULTS[trial.kind], time.time()
    moment = begin if kind.do is None else 0.0
    seen = [begin for _ in agents]  # when each host last had a rank
    while True:
        now = time.time()
        left = [hosts.ranks(host) for host in range(hosts.num)]
        seen = [now if left[host] else seen[host] for host in range(hosts.num)]
        if kind.do is not None and not moment and note.exists():
            kind.do(hosts, trial, hosts.find(trial.host, int(note.read_text())))
            moment = time.time()
            done(note).touch()
        has_ended = all(agent.outcome for agent in agents) and not any(left)
        is_late = now > (moment + LONGEST_S if moment else begin + _JOB_S)
        if has_ended or is_late or (moment and kind.may_keep_agents and now > max(seen) + _AGENTS_S):
            break
        time.sleep(0.05)
    if not moment:
        assert has_ended, f"{trial} did not begin\n" + "\n".join(agent.screen for agent in agents)
        return None
    ended = [None if left[host] else seen[host] - moment for host in range(hosts.num)]
    return tuple(_on_host(trial, host, agent, ended[host], moment) for host, agent in enumerate(agents)), sum(map(len, left))


_FAILURE = re.compile(
    r"^(?:ERROR:[\w.]+:)?((?:stuck: |error: |rank \d+ (?:failed|stops|lost)|ranks were not given|[\w./ -]+: error: ).*)",
    re.MULTILINE,
)
"""A line of ours about a failure. In a script of others a logger of its own may stand before it."""
_ROOT = re.compile(r"^Root Cause.*?^ +rank +: (\d+) .*?^ +traceback : (.*?)$", re.MULTILINE | re.DOTALL)
"""torchrun's report: a rank, and its reason."""
_AGENT = re.compile(r"^[\w.]*RendezvousConnectionError: .*", re.MULTILINE)
"""What a torchrun says that has lost its store, and ends its ranks before they can say anything."""
_OWN = re.compile(r"^rank \d+ (?:stops|lost)[^:]*: ")
"""What a rank says of itself before it names another one."""
_STORE = re.compile(r"store.*(?:MASTER_ADDR|node0)|lost the job's store|connection to the C10d store")


def _on_host(trial: Trial, host: int, agent: Agent, rank_s: float | None, moment: float) -> OnHost:
    lines = _FAILURE.findall(agent.screen)
    root = _ROOT.search(agent.screen)
    if root is not None:
        lines.append(f"rank {root[1]}: {root[2]}" if root[2].startswith(("Signal ", "To enable")) else root[2])
    lines = lines or _AGENT.findall(agent.screen)
    outcome = agent.outcome
    return OnHost(
        rank_s=None if rank_s is None else round(max(rank_s, 0.0), 1),
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
    side, everybody = side_of(trial), set(range(layout.num_hosts))
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


def job_of(folder: Path, layout: Layout, kind: Kind | None = None, *, is_at_fault: bool = False) -> list[str]:
    """Script and flags."""
    if layout.is_script:
        given = f"{SMALL} {WITHOUT_KERNELS} --pipeline-model-parallel-size {layout.pipeline} --train-iters {lab.NUM_ITERATIONS}"
        given += f" --eval-interval 3 --save {folder / 'saved'} --load {folder / 'saved'} --save-interval 2 --clip-grad 0.5"
        ours = [*layout.flags, "--zero-bubble-watchdog-seconds", str(lab.WATCHDOG_S)]
        run, script = ROOT / "megatron/zerobubble/run.py", Path(__file__).with_name("script.py")
        return [str(run), *ours, str(script), *given.split(), "--distributed-timeout-minutes", "1"]
    flags = lab.flags_of(folder, list(layout.flags), layout.pipeline)
    if kind is not None and kind.lacks == "--data-path":
        flags.remove("--mock-data")
    lacks = [] if kind is None or kind.lacks is None else [kind.lacks, str(LOCAL / _NAMES[kind.lacks])]
    return [str(lab.JOB), *flags, *lacks, *(kind.flags if kind is not None and is_at_fault else ())]


_NAMES = {"--data-path": "text", "--load": "saved", "--zero-bubble-load-plan": "plan.json"}


def _give(flag: str, local: Path, trial: Trial) -> None:
    """Put the file of a flag into a folder."""
    layout = LAYOUTS[trial.layout]
    if flag == "--data-path":
        write_documents(local / "text", random_documents([40] * 20))
    elif flag == "--load":
        _go_on(local, layout)
    else:
        schedule = "zbv" if ZBV[0] in layout.flags else "zb-h1"
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
def undisturbed(layout: str) -> Losses:
    """The losses of a job without a fault."""
    with tempfile.TemporaryDirectory() as name:
        return _go_on(Path(name), LAYOUTS[layout])
