"""Run steps one after the other; each one's output goes to the screen and to a file as it comes."""

from __future__ import annotations

import enum
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools.gpu.steps import Step

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Status(enum.Enum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    LATE = "FAILED, did not end in time"
    SKIPPED = "not run"


@dataclass(frozen=True)
class Outcome:
    """What a step did."""

    step: Step
    status: Status
    seconds: float = 0.0
    tail: tuple[str, ...] = ()
    """The last lines of its output, or why it did not run."""


def run(steps: Sequence[Step], out: Path, *, num_gpus: int, root: Path, minutes: float) -> Iterator[Outcome]:
    """Run the steps that the machine has GPUs for, until the time is over; a failed step does not end the others."""
    end = time.monotonic() + 60.0 * minutes
    for number, step in enumerate(steps, 1):
        title = f"[{number}/{len(steps)}] {step.name}"
        why = _obstacle(step, num_gpus, is_over=time.monotonic() > end)
        if why is not None:
            yield Outcome(step, Status.SKIPPED, tail=(why,))
            continue
        print(f"{title} (at most {step.minutes:g} min; {step.files}.log)", flush=True)
        yield _run(step, out, root)


def _obstacle(step: Step, num_gpus: int, *, is_over: bool) -> str | None:
    """Why a step cannot run here; None if it can."""
    if step.num_gpus > num_gpus:
        return f"needs {step.num_gpus} GPUs, and there {'is' if num_gpus == 1 else 'are'} {num_gpus}"
    if step.program is not None and shutil.which(step.program) is None:
        return f"needs {step.program}, which is not on the PATH"
    return "the time was over" if is_over else None


def _run(step: Step, out: Path, root: Path) -> Outcome:
    command = [word.format(out=out) for word in step.command]
    environment = {**os.environ, **{name: value.format(out=out) for name, value in step.environment}}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    begin, is_late = time.monotonic(), threading.Event()
    with (out / f"{step.files}.log").open("w", encoding="utf-8") as log:
        try:
            process = subprocess.Popen(
                command,
                cwd=root,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(step, Status.FAILED, tail=(f"cannot run {command[0]}: {error.strerror}",))

        def end_late() -> None:
            is_late.set()
            _end(process)

        timer = threading.Timer(60.0 * step.minutes, end_late)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout:
                tail = _copy(process.stdout, log)
            code = process.wait()
        except BaseException:
            _end(process)  # its ranks, too
            raise
        finally:
            timer.cancel()
    status = Status.LATE if is_late.is_set() else Status.PASSED if code == 0 else Status.FAILED
    return Outcome(step, status, time.monotonic() - begin, tuple(tail))


def _copy(lines: IO[str], log: IO[str]) -> list[str]:
    tail: list[str] = []
    for line in lines:
        sys.stdout.write(line)
        sys.stdout.flush()
        log.write(_ESCAPES.sub("", line))
        log.flush()
        tail = [*tail[-24:], _ESCAPES.sub("", line).rstrip()]
    return tail


def _end(process: subprocess.Popen[str]) -> None:
    """End a step with all of its processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
