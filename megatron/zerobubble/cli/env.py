"""`zerobubble env`: what a report about a problem needs to say of the machine and of what is installed."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from types import ModuleType

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.search.core import library
from megatron.zerobubble.version import __version__

__all__ = ["described", "main"]

_PACKAGES = ("megatron-core", "transformer-engine", "apex", "flash-attn", "numpy")
_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "NVTE_", "ZERO_BUBBLE")


def main(argv: Sequence[str] | None = None) -> int:
    """Print it."""
    parser = Parser(prog="zerobubble env", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    print("\n".join(described()))
    return 0


def described() -> Iterator[str]:
    """A line per package, device and variable; then how the GPUs are connected. Works without torch and without a GPU."""
    yield f"megatron-zerobubble {__version__}, compiled search core: {_compiled()}"
    yield f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        yield "torch: not installed"
    else:
        yield f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
        yield from _devices(torch)
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name}: not installed"
    yield from (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES))
    yield from _output("nvidia-smi", "topo", "-m").splitlines()


def _compiled() -> str:
    try:
        library()
    except ConfigError as error:
        return f"no: {error}"
    return "yes"


def _devices(torch: ModuleType) -> Iterator[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield "no GPU"
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory_gib, capability = properties.total_memory / 2**30, f"sm_{properties.major}{properties.minor}"
        yield f"GPU {index}: {properties.name}, {memory_gib:.0f} GiB, {capability}"
    if torch.distributed.is_nccl_available():
        yield "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    yield f"driver {driver[0] if driver else 'unknown'}"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
