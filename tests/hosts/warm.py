"""Starts torchrun on hosts, from a process that has torch and megatron-core imported (`tests.training.warm_start`).

A request is a line of JSON on stdin: the process number of the host's init, and what `warm_start` takes. The agent is forked into
the host's namespaces. Its outcome, the time and its exit code, is written to a file when it has ended. With "is_cold"
it is a new Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.training.launch import ROOT
from tests.training.warm_start import become_torchrun, preload

_NAMESPACES = 0x40000000 | 0x04000000 | 0x00020000 | 0x20000000
"""Of the network, the host's name, mounts and, for children, processes: linux/sched.h."""
AHEAD, VERSION = "ZB_TEST_AHEAD_S", "ZB_TEST_VERSION"
"""Environment variables: by how many seconds the host's clock is ahead, and the version of torch that it has."""


def serve() -> None:
    """Start the agents of stdin; each has a process that waits for it, outside of its host."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(json.loads(line))


def _run(request: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(request["init"]), _NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.chdir(ROOT)
    agent = os.fork()
    if agent == 0:
        _differ(request["env"])
        become_torchrun(request)
    code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    ended = Path(request["ended"])
    with suppress(FileNotFoundError):  # nobody waits any more
        ended.with_suffix(".part").write_text(f"{time.time()} {code}")
        ended.with_suffix(".part").rename(ended)
    os._exit(0)


def _differ(variables: dict[str, str]) -> None:
    """Let time, and torch's version, be other ones in this process and those that it forks."""
    if AHEAD in variables:
        real, real_ns, ahead_s = time.time, time.time_ns, float(variables[AHEAD])
        time.time = lambda: real() + ahead_s
        time.time_ns = lambda: real_ns() + int(1e9 * ahead_s)
    if VERSION in variables:
        torch.__version__ = variables[VERSION]


if __name__ == "__main__":
    preload()
    serve()
