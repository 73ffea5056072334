"""Memory of the ranks in the log, as Megatron-LM's training loop reports it.

On a GPU it is that of torch's allocator. The CPU has no such counts: there it is the resident memory of the rank's process.
"""

from __future__ import annotations

import logging
import resource
import sys

import torch
from megatron.core import parallel_state

__all__ = ["log_memory"]

_log = logging.getLogger(__name__)

_ON_GPU = ("allocated", "max allocated", "reserved", "max reserved")
_ON_CPU = ("max resident",)


def log_memory(iteration: int) -> None:
    """Log one line for every rank of the first data-parallel replica. All ranks must call this; rank 0 writes.

    Args:
        iteration: iterations done.
    """
    names, values = (_ON_GPU, _gpu_bytes()) if _uses_gpu() else (_ON_CPU, [_resident_bytes()])
    is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    everyone: list[list[float]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, [float(is_first_replica), *values])
    for rank, (is_shown, *counts) in enumerate(everyone):
        if is_shown:
            parts = " | ".join(f"{name}: {count / 2**20:.2f}" for name, count in zip(names, counts, strict=True))
            _log.info("[Rank %d] (after %d iterations) memory (MB) | %s", rank, iteration, parts)


def _uses_gpu() -> bool:
    return torch.cuda.is_initialized()


def _gpu_bytes() -> list[float]:
    counts = (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)
    return [float(count()) for count in (*counts, torch.cuda.memory_reserved, torch.cuda.max_memory_reserved)]


def _resident_bytes() -> float:
    """Peak of the process; getrusage counts KiB, and bytes on macOS."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1.0 if sys.platform == "darwin" else 1024.0)
