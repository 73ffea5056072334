"""A job of pretrain_gpt.py, started as a user does, whose ranks are killed with SIGKILL at random moments."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
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
        """Iterations done again after each kill. An error if there were more restarts than kills, or less."""
        line = r"^restart \d+: (?:resuming after iteration (\d+)|nothing that this job)"
        resumed = re.findall(line, self.output, re.MULTILINE)
        return [before - int(after or 0) for before, after in zip(self.kills, resumed, strict=True)]


def kill_ranks(arguments: Sequence[object], *, num_ranks: int, folder: Path, num_kills: int, seed: int) -> Killed:
    """Run a job and kill random ranks of it at random moments, each after it has recovered from the kill before."""
    log, output = folder / "metrics.jsonl", folder / "output.txt"
    argv = command([*arguments, "--metrics-jsonl", log], num_ranks=num_ranks, max_restarts=num_kills + 1)
    with output.open("wb") as to, subprocess.Popen(argv, stdout=to, stderr=to, env=environment(), cwd=ROOT) as job:
        try:
            kills = kill_at_random(
                log,
                num_kills=num_kills,
                seed=seed,
                is_over=lambda: job.poll() is not None,
                kill=lambda chance: _kill(job.pid, chance.randrange(num_ranks)),
            )
        finally:
            if job.poll() is None:
                job.terminate()
    return Killed(metrics_of(log), output.read_text(errors="replace"), job.returncode, kills)


def kill_at_random(
    log: Path, *, num_kills: int, seed: int, is_over: Callable[[], bool], kill: Callable[[random.Random], bool]
) -> tuple[int, ...]:
    """Kill ranks of a job at random moments, each after the job has recovered from the kill before, and wait for its end.

    Args:
        log: its metrics file.
        num_kills: how often.
        seed: of the moments.
        is_over: whether the job has ended.
        kill: kills a random rank; returns whether there was one.

    Returns:
        The last iteration before each kill.
    """
    chance, until, kills = random.Random(seed), time.monotonic() + _TIMEOUT_S, []
    for _ in range(num_kills):
        _wait(log, is_over, done=_last(log) + chance.randint(1, MOST_NEW), until=until)
        time.sleep(chance.uniform(0.0, 0.2))
        before = _last(log)
        assert kill(chance), "the job was over before the kill"
        kills.append(before)
        _wait(log, is_over, done=before + 1, until=until)
    while not is_over():
        if time.monotonic() > until:
            raise TimeoutError("the job did not end in time")
        time.sleep(_POLL_S)
    return tuple(kills)


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


def _wait(log: Path, is_over: Callable[[], bool], *, done: int, until: float) -> None:
    """Wait until iteration `done` is logged, or the job has ended."""
    while _last(log) < done and not is_over():
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


def metrics_of(log: Path) -> dict[int, dict[str, Any]]:
    """Iteration -> fields; the last one wins, as an iteration may have been done again."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(ValueError):  # a line that is being written
            fields = json.loads(line)
            found[int(fields["iteration"])] = fields
    return found


def _last(log: Path) -> int:
    return max(metrics_of(log), default=0)
