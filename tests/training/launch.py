"""Starts training jobs as a user does, through torchrun, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "pretrain_gpt.py"
TIMEOUT_S = 240
"""Seconds; a job needs a few, and this many only on a busy machine."""

TINY_MODEL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
TINY_BATCH = ["--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-2", "--log-interval", "1"]


def command(arguments: Sequence[object], *, num_ranks: int, script: Path = PRETRAIN) -> list[str]:
    """The command line that starts a job."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", str(script)]
    return [*start, *map(str, arguments)]


def launch(
    arguments: Sequence[object], *, num_ranks: int, script: Path = PRETRAIN, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run `script` on `num_ranks` ranks and return its output and exit code."""
    return subprocess.run(
        command(arguments, num_ranks=num_ranks, script=script),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment(),
        cwd=ROOT,
    )


def train(arguments: Sequence[object], *, num_ranks: int = 2) -> str:
    """Run a job that must succeed; return its standard output."""
    done = launch(arguments, num_ranks=num_ranks)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    """This process' environment without what pytest or an outer job set, one thread per rank."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def metrics(path: Path) -> dict[int, dict[str, Any]]:
    """A --metrics-jsonl file: iteration -> object. The last one wins, as in a run that was continued."""
    return {fields["iteration"]: fields for fields in map(json.loads, path.read_text().splitlines())}
