"""What a report says about the machine: devices, versions, environment. Works without a GPU, too."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("megatron-core", "transformer-engine", "apex", "flash-attn")
_FREE_GIB = 5
"""Free disk space that is enough for logs, traces and a profile."""
_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "NVTE_")


def describe() -> str:
    """Lines of text."""
    return "\n".join([*_software(), *_devices(), *_environment(), *_topology()])


def num_gpus() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def imports(name: str) -> bool:
    """Whether a module imports here."""
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


def missing(root: Path) -> Iterator[str]:
    """What would make steps slower, leave them out or let them fail, each with what to do."""
    if num_gpus() and not torch.distributed.is_nccl_available():
        yield "NCCL in this torch: install one that is built for CUDA"
    for name, why in (
        ("transformer_engine.pytorch", "layers are megatron-core's own, and nothing runs in FP8"),
        ("fused_weight_gradient_mlp_cuda", "W adds by torch (apex --wgrad, not needed with Transformer Engine)"),
    ):
        if not imports(name):
            yield f"{name}: {why}"
    if not imports("megatron.zerobubble.plan.search._core"):
        yield "the planner's compiled core: pip install -e . --no-deps --no-build-isolation; searches are slow without it"
    if shutil.which("nsys") is None:
        yield "nsys: the last step is left out"
    free = shutil.disk_usage(root).free / 2**30
    if free < _FREE_GIB:
        yield f"disk: {free:.0f} GiB are free at {root}, and logs and traces may take {_FREE_GIB}"


def _software() -> Iterator[str]:
    yield f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    yield f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name}: not installed"
    commit = _output("git", "describe", "--always", "--dirty")
    yield f"commit {commit or 'unknown: not a git checkout'}"


def _devices() -> Iterator[str]:
    if not num_gpus():
        yield "no GPU"
        return
    for index in range(num_gpus()):
        properties = torch.cuda.get_device_properties(index)
        memory_gib, capability = properties.total_memory / 2**30, f"sm_{properties.major}{properties.minor}"
        yield f"GPU {index}: {properties.name}, {memory_gib:.0f} GiB, {capability}"
    if torch.distributed.is_nccl_available():
        yield "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    yield f"driver {driver[0] if driver else 'unknown'}"


def _environment() -> Iterator[str]:
    return (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES))


def _topology() -> list[str]:
    return _output("nvidia-smi", "topo", "-m").splitlines()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
