"""Step 0: the card, its clocks, versions and the kernel of W, and a training step on it."""

from __future__ import annotations

import shutil
import subprocess

import torch
from megatron.core.package_info import __version__ as megatron_core

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.wgrad.gemm import working_kernels
from tools.benchmarks.one_gpu.alone import Alone, alone
from tools.benchmarks.one_gpu.ranks import CONTENDERS, flags
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row

_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def measure(setting: Setting) -> Row:
    """What is here; and ZB-H1 on one rank, whose loss must be finite."""
    kernels = working_kernels(setting.device, input_dtype=setting.dtype, accumulator_dtype=torch.float32)
    [contender] = [each for each in CONTENDERS if each.schedule == "zb-h1"]
    with HostDevice(enabled=not setting.on_gpu) as host, alone(0, 1, setting.device):
        job = Alone(flags(contender, setting, 1, 2), rank=0, num_ranks=1, host=host)
        job.iterate()
        finite = all(bool(torch.isfinite(each).all()) for chunk in job.state.chunks for each in chunk.parameters())
        job.close()
    if not finite:
        raise ArithmeticError("weights are not finite after a training step")
    return {
        "device": torch.cuda.get_device_name(setting.device) if setting.on_gpu else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "megatron_core": megatron_core,
        "kernels": [kernel.kind.value for kernel in kernels],
        "nvidia_smi": _clocks(),
    }


def _clocks() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().split(", ")
    return dict(zip(_QUERY.split(","), found, strict=False))
