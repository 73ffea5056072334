"""What a report says about the machine, and what is missing there. Works without a GPU, too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.zerobubble.cli.env import described
from megatron.zerobubble.plan.search.core import BUILT

_FREE_GIB = 5
"""Free disk space that is enough for logs, traces and a profile."""


def describe() -> str:
    """Lines of text."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    return "\n".join([*described(), f"commit {commit or 'unknown: not a git checkout'}"])


def num_gpus() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def imports(name: str) -> bool:
    """Whether a module imports here."""
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


def has_fp8() -> bool:
    """Whether Transformer Engine imports and every GPU computes in FP8."""
    capable = all(torch.cuda.get_device_capability(each) >= (8, 9) for each in range(num_gpus()))
    return capable and imports("transformer_engine.pytorch")


def missing(root: Path) -> Iterator[str]:
    """What would make steps slower, leave them out or let them fail, each with what to do."""
    if num_gpus() and not torch.distributed.is_nccl_available():
        yield "NCCL in this torch: install one that is built for CUDA"
    for name, why in (
        ("transformer_engine.pytorch", "layers are megatron-core's own, and nothing runs in FP8"),
        ("pytest_timeout", "tests fail: pip install pytest pytest-timeout hypothesis"),
        ("fused_weight_gradient_mlp_cuda", "W adds by torch (apex --wgrad, not needed with Transformer Engine)"),
    ):
        if not imports(name):
            yield f"{name}: {why}"
    if not BUILT.exists():
        yield "the planner's compiled core: pip install -e . --no-deps --no-build-isolation; there are no searches without it"
    if shutil.which("nsys") is None:
        yield "nsys: the last step is left out"
    free = shutil.disk_usage(root).free / 2**30
    if free < _FREE_GIB:
        yield f"disk: {free:.0f} GiB are free at {root}, and logs and traces may take {_FREE_GIB}"
