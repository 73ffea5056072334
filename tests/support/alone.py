"""megatron-core in this process alone, without the ranks of a pool."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties

with quiet_third_parties():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

SEED = 1234


@contextmanager
def alone() -> Iterator[None]:
    """A context with the host-device layer, and megatron-core's process groups for a world of this process."""
    with HostDevice(), warnings.catch_warnings():
        # megatron-core warns on import and on every config about what is deprecated or not installed.
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel(1, 1)
            torch.manual_seed(SEED)
            model_parallel_cuda_manual_seed(SEED)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
