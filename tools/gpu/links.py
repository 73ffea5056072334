"""Measure messages between two ranks, and say how NCCL carries them. Started by torchrun with two processes; gloo without GPUs.

33 MB is one microbatch of 4,096 tokens at hidden size 4096 in bf16. The channels are counted in NCCL's own log (NCCL_DEBUG_FILE):
a transfer uses up to that many CTAs, each on a multiprocessor (SM) that it keeps while it waits.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

_BYTES = 2 * 4096 * 4096
_REPEATS = 20
_CHANNEL = re.compile(r"Channel (\d+)\S* : .* via (\S+)")


def main() -> None:
    """Print one line on rank 0."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    message, times = torch.zeros(_BYTES // 2, dtype=torch.bfloat16, device=device), []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        for source in (0, 1):
            if rank == source:
                dist.send(message, 1 - source)
            else:
                dist.recv(message, source)
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 2)
    if rank == 0:
        print(f"links: {_BYTES / median(times) / 1e9:.1f} GB/s one way, {_BYTES / 1e6:.1f} MB{_channels()}")
    dist.destroy_process_group()


def _channels() -> str:
    file = Path(os.environ.get("NCCL_DEBUG_FILE", "").replace("%p", str(os.getpid())))
    found = _CHANNEL.findall(file.read_text(errors="replace")) if file.is_file() else []
    return f"; NCCL {len({number for number, _ in found})} channels via {found[0][1]}" if found else ""


if __name__ == "__main__":
    main()
