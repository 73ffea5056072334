"""Trials of the fault laboratory: one fault in one job, and the promises of docs/reliability.md checked afterwards.

The jobs are real: torchrun, real process groups, checkpoints on disk. A trial is drawn from a seed, so that it can be repeated.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.inject import PHASES, Fault
from tests.training.launch import ROOT, TIMEOUT_S, TINY_BATCH, TINY_MODEL, environment, launch_warm

JOB = Path(__file__).parent / "job.py"
WATCHDOG_S = 10.0
PROMISED_S = WATCHDOG_S + 40.0
"""Seconds from a fault to the end of the job."""
LAYOUTS = {
    "zb-h1-p2": (2, ["--enable-zero-bubble"]),
    "zbv-p2": (2, ["--zero-bubble-v-schedule", "--enable-optimizer-post-validation"]),
    "zb-h1-p4": (4, ["--enable-zero-bubble"]),
    "stock-p2": (2, []),
}
_CULPRIT = re.compile(
    r"stuck: ranks (\d+) and (\d+) |stuck: rank (\d+) |rank (\d+) failed|rank \d+ stops.*: rank (\d+) \("
    r"|error: .* cannot be written: rank (\d+):"
)
NUM_ITERATIONS = 6
KINDS = ("raise", "kill", "stop", "cut", "full")


@dataclass(frozen=True)
class Trial:
    """One fault in one job."""

    kind: str
    phase: str
    layout: str
    rank: int
    after_ms: float


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    trial: Trial
    seconds: float
    """From the fault to the end of the job."""
    named: tuple[int, ...]
    """Ranks that the first line names, or that torchrun names where no rank wrote one."""
    expected: tuple[int, ...]
    """The rank with the fault; with a cut link, both."""
    root_cause: int
    """The rank that torchrun takes for the first failure."""
    num_left: int
    """Processes of the job that are still there."""
    resumed_at: int
    """Iteration of the newest checkpoint, from which the job went on; 0: there was none yet."""
    has_same_losses: bool
    """Whether the job that went on has the losses of the undisturbed one, bit for bit."""

    @property
    def is_as_promised(self) -> bool:
        """All promises but the time, which depends on the machine."""
        # A checkpoint that cannot be written fails on all ranks at once, with the reason of the one.
        is_root = self.root_cause in self.expected or self.trial.kind == "full"
        named = self.named == self.expected and is_root
        return named and self.num_left == 0 and self.has_same_losses


def drawn(seed: str) -> Trial:
    """The trial of a seed."""
    generator = random.Random(seed)
    layout = generator.choice(list(LAYOUTS))
    kind = generator.choice(KINDS)
    phase = "saves" if kind == "full" else generator.choice(list(PHASES))
    rank = 0 if kind == "full" and generator.random() < 0.5 else generator.randrange(LAYOUTS[layout][0])
    after_ms = 0.0 if kind == "full" or phase == "leaves" else generator.choice([0.0, generator.uniform(0.0, 60.0)])
    return Trial(kind, phase, layout, rank, after_ms)


def run(trial: Trial, folder: Path) -> Outcome | None:
    """Run a job with the fault, then let it go on without. None: the job was over before the moment of the fault, or before
    another message came over the link that was cut."""
    note = folder / "note"
    num_ranks, flags = LAYOUTS[trial.layout]
    fault = Fault(trial.kind, trial.rank, trial.phase, trial.after_ms, str(note))
    marker = f"ZB_TEST_TRIAL={folder}"
    done = started(flags_of(folder, flags, num_ranks), num_ranks, fault, ZB_TEST_TRIAL=str(folder))
    ended = time.time()
    if not note.exists() or (trial.kind == "cut" and done.returncode == 0):
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert losses_of(folder) == _undisturbed(trial.layout), "a fault that happened to nobody changes nothing"
        return None
    assert done.returncode != 0, f"{trial}: the job ended as if nothing had happened\n{done.stdout}"
    when, _, *other = note.read_text().split()
    resumed_at, losses = go_on(folder, flags_of(folder, flags, num_ranks), num_ranks)
    return Outcome(
        trial=trial,
        seconds=round(ended - float(when), 1),
        named=_named(done.stdout, done.stderr),
        expected=tuple(sorted({trial.rank, *map(int, other)})),
        root_cause=_root_cause(done.stderr),
        num_left=_num_processes(marker),
        resumed_at=resumed_at,
        has_same_losses=losses == _undisturbed(trial.layout),
    )


def flags_of(folder: Path, flags: list[str], num_ranks: int) -> list[str]:
    """The flags of a job that saves, and goes on, in a folder."""
    saved = str(folder / "saved")
    return [
        *TINY_MODEL,
        *TINY_BATCH,
        *flags,
        *("--mock-data", "--pipeline-model-parallel-size", str(num_ranks)),
        *("--train-iters", str(NUM_ITERATIONS), "--eval-iters", "1", "--eval-interval", "3", "--save", saved, "--load", saved),
        *("--save-interval", "2", "--metrics-jsonl", str(folder / "metrics.jsonl"), "--clip-grad", "0.5"),
        *("--distributed-timeout-minutes", "1", "--zero-bubble-watchdog-seconds", str(WATCHDOG_S)),
    ]


def started(flags: list[str], num_ranks: int, fault: Fault, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a job with a fault. Its output goes to files: a process that is left behind must not keep a pipe open."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    variables = environment(**fault.environment(), **variables)
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        done = subprocess.run(
            [*start, str(JOB), *flags], stdout=stdout, stderr=stderr, timeout=TIMEOUT_S, check=False, env=variables, cwd=ROOT
        )
        said = [(file.seek(0), file.read())[1] for file in (stdout, stderr)]
    return subprocess.CompletedProcess(done.args, done.returncode, *said)


@functools.cache
def _undisturbed(layout: str) -> dict[int, float]:
    """The losses of a job without a fault."""
    num_ranks, flags = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as name:
        losses = go_on(Path(name), flags_of(Path(name), flags, num_ranks), num_ranks)[1]
    assert sorted(losses) == list(range(1, NUM_ITERATIONS + 1))
    return losses


def losses_of(folder: Path) -> dict[int, float]:
    """The last loss of each iteration. A job that has nothing left to train writes one more line, with a validation loss."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {fields["iteration"]: fields["loss"] for fields in lines if "loss" in fields}


def go_on(folder: Path, flags: list[str], num_ranks: int) -> tuple[int, dict[int, float]]:
    """Start a job, again or for the first time; (iteration from which it goes on, its losses)."""
    tracker = folder / "saved" / "latest_checkpointed_iteration.txt"
    begin = int(tracker.read_text()) if tracker.exists() else 0
    done = launch_warm(flags, num_ranks=num_ranks, script=JOB)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return begin, losses_of(folder)


def _named(stdout: str, stderr: str) -> tuple[int, ...]:
    """Ranks that the first line about the failure names."""
    for line in [*stdout.splitlines(), *stderr.splitlines()]:
        found = _CULPRIT.match(line)
        if found:
            return tuple(sorted(int(each) for each in found.groups() if each is not None))
    return (_root_cause(stderr),)


def _root_cause(stderr: str) -> int:
    found = re.search(r"Root Cause.*?rank +: (\d+)", stderr, re.DOTALL)
    assert found, stderr
    return int(found[1])


def _num_processes(marker: str) -> int:
    """Processes whose environment has the marker, after a moment to end."""
    count = 0
    for _ in range(20):
        count = sum(_has(process, marker) for process in Path("/proc").iterdir() if process.name.isdecimal())
        if count == 0:
            break
        time.sleep(0.25)
    return count


def _has(process: Path, marker: str) -> bool:
    try:
        is_zombie = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not is_zombie and marker in (process / "environ").read_text().split("\0")
    except (OSError, UnicodeDecodeError):
        return False


def record(outcome: Any) -> None:
    """Add a trial, a dataclass, to the file in ZB_TEST_FAULTS, if there is one, with what its properties say."""
    file = os.environ.get("ZB_TEST_FAULTS")
    if file:
        said = {name: getattr(outcome, name) for name, value in vars(type(outcome)).items() if isinstance(value, property)}
        numbers = {name: value for name, value in said.items() if isinstance(value, int | float)}
        with Path(file).open("a") as lines:
            lines.write(json.dumps(asdict(outcome) | numbers) + "\n")
