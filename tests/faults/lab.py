"""Trials of the fault laboratory: one fault in one job, and the promises of docs/reliability.md checked afterwards.

The jobs are real: torchrun, one per host, and real process groups. A trial is drawn from a seed, so that it can be repeated. The
hosts are names that ranks give themselves.

`python -m tests.faults.lab FILE` prints the trials in a file as a table.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.job import FAULT, HOST, PLACES
from tests.training.launch import ROOT, TIMEOUT_S, environment

WATCHDOG_S = 5.0
PROMISED_S = WATCHDOG_S + 50.0
"""Seconds from a fault to the end of the job."""
_MODEL = ["--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "2"]
_MODEL += ["--train-iters", "4", "--num-microbatches", "4"]
_V = ["--zero-bubble-v-schedule", "--enable-optimizer-post-validation", "--virtual-pipeline-model-parallel-size", "2"]
LAYOUTS = {
    "zb-h1-p2": (2, ["--enable-zero-bubble"]),
    "zbv-p2": (2, _V),
    "zb-h1-p4": (4, ["--enable-zero-bubble"]),
    "stock-p2": (2, ["--zero-bubble-schedule", "stock"]),
}
KINDS = {
    "raise": tuple(PLACES),
    "kill": tuple(PLACES),
    "stop": ("pass",),
    "hang": ("pass",),
}
"""What a rank does to itself, and where."""
_CULPRIT = re.compile(r"stuck: rank (\d+) |rank (\d+) failed|rank \d+ stops.*?: rank (\d+) \(")


@dataclass(frozen=True)
class Trial:
    """One fault in one job."""

    kind: str
    place: str
    layout: str
    rank: int
    call: int


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    trial: Trial
    seconds: float
    """From the fault to the end of the job."""
    named: int
    """The rank that the first line names, or that torchrun names where no rank wrote one."""
    is_last: bool
    """Whether torchrun's summary, at the end, names it, too."""
    num_left: int
    """Processes of the job that are still there."""

    @property
    def is_as_promised(self) -> bool:
        """All promises but the time, which depends on the machine."""
        return self.named == self.trial.rank and self.is_last and self.num_left == 0


def drawn(seed: str) -> Trial:
    """The trial of a seed."""
    generator = random.Random(seed)
    kind = generator.choice(list(KINDS))
    place = generator.choice(KINDS[kind])
    layout = generator.choice([name for name in LAYOUTS if name != "stock-p2" or kind in ("raise", "kill")])
    num_ranks, flags = LAYOUTS[layout]
    last = {"start": 1, "build": 1, "pass": 16 * (2 if flags == _V else 1), "step": 4, "between": 4}[place]
    first = 1 if kind in ("raise", "kill") else 1 + last // 4  # no alarm comes in a first iteration
    return Trial(kind, place, layout, generator.randrange(num_ranks), generator.randint(first, last))


def run(trial: Trial, folder: Path) -> Outcome:
    """Run a job with the fault."""
    note, num_ranks = folder / "note", LAYOUTS[trial.layout][0]
    fault = {"kind": trial.kind, "place": trial.place, "rank": trial.rank, "call": trial.call, "note": str(note)}
    with Host(["--standalone", f"--nproc-per-node={num_ranks}"], flags(trial.layout), folder / "screen", fault=fault) as host:
        code, ended, screen = host.wait(), time.time(), host.screen
        assert code != 0, f"{trial}: the job ended as if nothing had happened\n{screen}"
        assert note.exists(), f"{trial}: the job failed by itself\n{screen}"
        cause = screen[screen.index("Root Cause") :] if "Root Cause" in screen else ""
        names = (f"rank      : {trial.rank} ", f"rank {trial.rank} ", f"pipeline rank {trial.rank}")
        return Outcome(
            trial=trial,
            seconds=round(ended - float(note.read_text()), 1),
            named=_named(screen, cause),
            is_last=any(name in cause for name in names),
            num_left=host.num_left(),
        )


def flags(layout: str) -> list[str]:
    """The flags of a job."""
    num_ranks, own = LAYOUTS[layout]
    watchdog = [] if layout == "stock-p2" else ["--zero-bubble-watchdog-seconds", str(WATCHDOG_S)]
    return [*_MODEL, "--pipeline-model-parallel-size", str(num_ranks), *own, *watchdog]


class Host:
    """A torchrun and its ranks. Nothing of them is left at the end of the context.

    Args:
        torchrun: its flags.
        flags: of the job.
        screen: file with what it prints: a process that is left behind must not keep a pipe open.
        fault: see `job`.
        name: that its ranks give it; None: that of this machine.
    """

    def __init__(
        self, torchrun: list[str], flags: list[str], screen: Path, *, fault: dict[str, Any] | None = None, name: str | None = None
    ) -> None:
        self._file, self._marker = screen, f"ZB_TEST_SCREEN={screen}"
        variables = {"ZB_TEST_SCREEN": str(screen)}
        variables |= {} if fault is None else {FAULT: json.dumps(fault)}
        variables |= {} if name is None else {HOST: name}
        start = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "tests.faults.job", *flags]
        with screen.open("w") as file:
            self._process = subprocess.Popen(start, stdout=file, stderr=file, env=environment(**variables), cwd=ROOT)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def screen(self) -> str:
        """What it has printed."""
        return self._file.read_text(errors="replace")

    def wait(self) -> int:
        """Wait for torchrun; its exit code."""
        return self._process.wait(TIMEOUT_S)

    def kill(self) -> None:
        """Kill torchrun and its ranks, as when the host loses its power."""
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def num_left(self) -> int:
        """Processes that are left, after a moment to end."""
        until = time.monotonic() + 5.0
        while (count := len(self._pids())) and time.monotonic() < until:
            time.sleep(0.25)
        return count

    def _pids(self) -> list[int]:
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and self._has(path)]

    def _has(self, process: Path) -> bool:
        try:
            is_zombie = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            return not is_zombie and self._marker in (process / "environ").read_text().split("\0")
        except (OSError, UnicodeDecodeError):
            return False


@contextmanager
def two_hosts(folder: Path, flags_of_hosts: list[list[str]], *, fault: dict[str, Any] | None = None) -> Iterator[list[Host]]:
    """A job of one rank on each of two hosts, node0 and node1, with a static rendezvous at the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    hosts = []
    try:
        for number, each in enumerate(flags_of_hosts):
            screen = folder / f"screen{number}"
            hosts.append(Host([*torchrun, f"--node-rank={number}"], each, screen, fault=fault, name=f"node{number}"))
        yield hosts
    finally:
        for host in hosts:
            host.kill()


def _named(screen: str, cause: str) -> int:
    for line in screen.splitlines():
        found = _CULPRIT.match(line)
        if found:
            return int(next(each for each in found.groups() if each is not None))
    found = re.search(r"rank +: (\d+)", cause)
    assert found, screen
    return int(found[1])


def record(outcome: Outcome) -> None:
    """Add a trial to the file in ZB_TEST_FAULTS, if there is one."""
    file = os.environ.get("ZB_TEST_FAULTS")
    if file:
        with Path(file).open("a") as lines:
            lines.write(json.dumps(asdict(outcome) | {"is_as_promised": outcome.is_as_promised}) + "\n")


def table(file: Path) -> str:
    """Markdown: per kind of fault the number of trials, how many were as promised, and the seconds to the end of the job."""
    trials: Mapping[str, list[Any]] = defaultdict(list)
    for outcome in map(json.loads, file.read_text().splitlines()):
        trials[outcome["trial"]["kind"]].append(outcome)
    lines = ["| fault | trials | as promised | places | seconds to the end, median and most |", "|---|---|---|---|---|"]
    for kind, outcomes in sorted(trials.items()):
        good, places = sum(each["is_as_promised"] for each in outcomes), len({each["trial"]["place"] for each in outcomes})
        seconds = sorted(each["seconds"] for each in outcomes)
        lines.append(f"| {kind} | {len(outcomes)} | {good} | {places} | {seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1])) + "\n")
