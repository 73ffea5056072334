"""A job of pretrain_gpt.py, started as a user does, whose ranks are killed with SIGKILL at random moments."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.training.launch import ROOT, command, environment

MOST_NEW = 6
"""Most iterations between the end of one recovery and the next kill."""
_COMPARED = ("loss", "grad_norm", "lr", "skipped")
_POLL_S = 0.02
_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Killed:
    """A job whose ranks were killed."""

    metrics: dict[int, dict[str, Any]]
    """What the job logged, by iteration."""
    output: str
    """Standard output and error."""
    exit_code: int
    """torchrun's."""
    kills: tuple[int, ...]
    """The last iteration before each kill."""

    @property
    def redone(self) -> list[int]:
        """Iterations done again after each kill."""
        line = r"^restart \d+: (?:resuming after iteration (\d+)|nothing that this job)"
        resumed = re.findall(line, self.output, re.MULTILINE)
        return [before - int(after or 0) for before, after in zip(self.kills, resumed, strict=True)]


def kill_ranks(arguments: Sequence[object], *, num_ranks: int, folder: Path, num_kills: int, seed: int) -> Killed:
    """Run a job and kill random ranks of it at random moments, each after it has recovered from the kill before."""
    chance, log, output = random.Random(seed), folder / "metrics.jsonl", folder / "output.txt"
    argv = command([*arguments, "--metrics-jsonl", log], num_ranks=num_ranks, max_restarts=num_kills + 1)
    until, kills = time.monotonic() + _TIMEOUT_S, []
    with output.open("wb") as to, subprocess.Popen(argv, stdout=to, stderr=to, env=environment(), cwd=ROOT) as job:
        try:
            for _ in range(num_kills):
                _wait(log, job, done=_last(log) + chance.randint(1, MOST_NEW), until=until)
                time.sleep(chance.uniform(0.0, 0.2))
                before = _last(log)
                assert _kill(job.pid, chance.randrange(num_ranks)), "the job was over before the kill"
                kills.append(before)
                _wait(log, job, done=before + 1, until=until)
            job.wait(max(1.0, until - time.monotonic()))
        finally:
            if job.poll() is None:
                job.terminate()
    return Killed(_metrics(log), output.read_text(errors="replace"), job.returncode, tuple(kills))


def differences(actual: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> list[str]:
    """Iterations that are missing, and values that are not the same bit for bit."""
    missing = [f"iteration {each}" for each in sorted(set(actual) ^ set(expected))]
    both = sorted(set(actual) & set(expected))
    return missing + [
        f"{name} of iteration {each}: {actual[each].get(name)} for {expected[each].get(name)}"
        for each in both
        for name in _COMPARED
        if actual[each].get(name) != expected[each].get(name)
    ]


def _wait(log: Path, job: subprocess.Popen[bytes], *, done: int, until: float) -> None:
    """Wait until iteration `done` is logged, or the job has ended."""
    while _last(log) < done and job.poll() is None:
        if time.monotonic() > until:
            raise TimeoutError(f"iteration {done} was not done in time")
        time.sleep(_POLL_S)


def _kill(torchrun: int, rank: int) -> bool:
    """Kill the process of a rank; return whether there was one."""
    for children in Path(f"/proc/{torchrun}/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(OSError):
                if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes() + b"\0":
                    os.kill(int(child), signal.SIGKILL)
                    return True
    return False


def _metrics(log: Path) -> dict[int, dict[str, Any]]:
    """Iteration -> fields; the last one wins, as an iteration may have been done again."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(ValueError):  # a line that is being written
            fields = json.loads(line)
            found[int(fields["iteration"])] = fields
    return found


def _last(log: Path) -> int:
    return max(_metrics(log), default=0)
