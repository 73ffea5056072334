"""Starts training jobs as a user does, through torchrun, and reads what they wrote.

`launch` starts a job cold, as a user does. `train` starts it from a process that has torch and megatron-core imported
(`warm_start.py`), for jobs whose start-up is not what is tested: that takes two seconds instead of seven.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "tests" / "training" / "reference_trainer.py"
TIMEOUT_S = 240
"""Seconds; a job needs a few, and this many only on a busy machine."""

TINY_MODEL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
LR = 1e-2
TINY_BATCH = ["--micro-batch-size", "2", "--global-batch-size", "8", "--lr", str(LR), "--log-interval", "1"]


def command(
    arguments: Sequence[object],
    *,
    num_ranks: int,
    script: Path = PRETRAIN,
    module: str | None = None,
    max_restarts: int = 0,
) -> list[str]:
    """The command line that starts a job of `script`, or of `module`."""
    started = [str(script)] if module is None else ["-m", module]
    torchrun = _torchrun_arguments(arguments, num_ranks, *started, max_restarts=max_restarts)
    return [sys.executable, "-m", "torch.distributed.run", *torchrun]


def _torchrun_arguments(arguments: Sequence[object], num_ranks: int, *started: str, max_restarts: int = 0) -> list[str]:
    torchrun = ["--standalone", f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    return [*torchrun, *started, *map(str, arguments)]


def launch(
    arguments: Sequence[object],
    *,
    num_ranks: int,
    script: Path = PRETRAIN,
    module: str | None = None,
    timeout_s: float = TIMEOUT_S,
    max_restarts: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run `script`, or `module`, on `num_ranks` ranks and return its output and exit code."""
    return subprocess.run(
        command(arguments, num_ranks=num_ranks, script=script, module=module, max_restarts=max_restarts),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment(),
        cwd=ROOT,
    )


def launch_warm(
    arguments: Sequence[object], *, num_ranks: int, script: Path = PRETRAIN, max_restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """As `launch`, with imports already done. With a GPU it starts cold: CUDA does not survive a fork."""
    import torch

    if torch.cuda.is_available():
        return launch(arguments, num_ranks=num_ranks, script=script, max_restarts=max_restarts)
    argv = _torchrun_arguments(arguments, num_ranks, str(script), max_restarts=max_restarts)
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        request = {"argv": argv, "env": environment(), "stdout": str(stdout), "stderr": str(stderr)}
        code = _run_warm(json.dumps(request))
        return subprocess.CompletedProcess(argv, code, stdout.read_text(), stderr.read_text())


def _run_warm(request: str) -> int:
    server = _warm_server()
    assert server.stdin is not None
    assert server.stdout is not None
    answer = ""
    try:
        server.stdin.write(f"{request}\n")
        server.stdin.flush()
        if select.select([server.stdout], [], [], TIMEOUT_S)[0]:
            answer = server.stdout.readline()
    finally:
        if not answer:  # too late, it died, or this process is interrupted
            server.terminate()
            server.wait()
            _warm_server.cache_clear()
    if not answer:
        raise TimeoutError(f"no end of the job in {TIMEOUT_S} s, or the process that started it died: {request}")
    return int(answer)


@functools.cache
def _warm_server() -> subprocess.Popen[str]:
    """Started once; a session of its own, so that Ctrl-C reaches this process alone, which then ends it."""
    start = [sys.executable, "-m", "tests.training.warm_start"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(start, **pipes, text=True, env=environment(), cwd=ROOT, start_new_session=True)
    atexit.register(server.kill)
    return server


def train(arguments: Sequence[object], *, num_ranks: int = 2, is_cold: bool = False) -> str:
    """Run a job that must succeed; return its standard output."""
    start = launch if is_cold else launch_warm
    done = start(arguments, num_ranks=num_ranks)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    """This process' environment without what pytest or an outer job set, one thread per rank; the same megatron-core."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    # NVTE_...: megatron-core sets them where it builds a model, in the process of a test, too
    own = [name for name in os.environ if name.startswith("NVTE_") and not name.startswith("NVTE_ALLOW_")]
    kept = {name: value for name, value in os.environ.items() if name not in (*dropped, *own)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def metrics(path: Path) -> dict[int, dict[str, Any]]:
    """A --metrics-jsonl file: iteration -> object. The last one wins, as in a run that was continued."""
    return {fields["iteration"]: fields for fields in map(json.loads, path.read_text().splitlines())}
