"""Starts torchrun jobs from a process that has already imported torch and megatron-core.

Importing them takes a rank of a job several seconds, nine tenths of what a job of a test costs. This process imports them once
and forks: first a torchrun, and torchrun its ranks (its own `--run-path --start-method fork`), so that rendezvous, environment,
flags, exit codes and output are torchrun's. Two things differ from ranks that start cold, which is why some jobs of the tests do
that: a wrong order of imports goes unnoticed, and all ranks hash strings with one seed.

Requests are lines of JSON on stdin, ``{"argv": [...], "env": {...}, "stdout": path, "stderr": path}``; each is answered by a line
with the job's exit code when the job has ended. The process ends after its last job when stdin does; on SIGTERM at once, and the
job under way with it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import Any

MODULES = (
    "torch.distributed.run",
    "megatron.core.dist_checkpointing",
    "megatron.zerobubble.training.trainer",
)


def preload() -> None:
    """Import what a training job imports."""
    from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

    with quiet_third_parties():
        for module in MODULES:
            importlib.import_module(module)


def serve() -> None:
    """Run the jobs of stdin, one after the other."""
    for line in sys.stdin:
        job = os.fork()
        if job == 0:
            become_torchrun(json.loads(line))
        previous = signal.signal(signal.SIGTERM, functools.partial(_end, job))
        _, status = os.waitpid(job, 0)
        signal.signal(signal.SIGTERM, previous)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _end(job: int, *_: object) -> None:
    with suppress(ProcessLookupError):
        os.killpg(job, signal.SIGKILL)
    os._exit(1)


def become_torchrun(request: dict[str, Any]) -> None:
    """Run a job in this process, and end it. With "cold" in the request, start a new Python for it."""
    os.setpgid(0, 0)
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for target, path in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, target)
            os.close(opened)
        os.environ.clear()
        os.environ.update(request["env"])
        tempfile.tempdir = None
        if request.get("is_cold"):
            os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *request["argv"]])
        from torch.distributed.run import main

        agent = os.getpid()
        os.register_at_fork(after_in_child=lambda: _become_rank(agent))
        main(["--start-method", "fork", "--run-path", *request["argv"]])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001  - whatever it is ends this process alone
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_rank(agent: int) -> None:
    """A new Python would end on torchrun's SIGTERM; one forked from the agent has the agent's handler, which raises."""
    if os.getppid() == agent:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    preload()
    serve()
