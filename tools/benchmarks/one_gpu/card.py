"""Step 0: the card, its clocks, versions and the kernel of W, and a training step on it."""

from __future__ import annotations

import shutil
import subprocess

import torch

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.wgrad.gemm import working_kernels
from tools.benchmarks.one_gpu.alone import Alone, alone
from tools.benchmarks.one_gpu.ranks import CONTENDERS, flags
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row

_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def measure(setting: Setting) -> Row:
    """What is here, and whether the weights of ZB-H1's last rank of two are finite after a step."""
    kernels = working_kernels(setting.device, input_dtype=setting.dtype, accumulator_dtype=torch.float32)
    [contender] = [each for each in CONTENDERS if each.schedule == "zb-h1"]
    with HostDevice(enabled=not setting.on_gpu) as host, alone(1, 2, setting.device):
        job = Alone(flags(contender, setting, 2, 2), rank=1, num_ranks=2, host=host)
        job.iterate()
        finite = all(bool(torch.isfinite(each).all()) for chunk in job.state.chunks for each in chunk.parameters())
        job.close()
    if not finite:
        raise ArithmeticError("weights are not finite after a training step")
    import megatron.core  # behind what stands in on the CPU for modules that it imports

    return {
        "device": torch.cuda.get_device_name(setting.device) if setting.on_gpu else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "megatron_core": megatron.core.__version__,
        "kernels": [kernel.kind.value for kernel in kernels],
        "nvidia_smi": _clocks(),
    }


def _clocks() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().split(", ")
    return dict(zip(_QUERY.split(","), found, strict=False))
