"""Process groups of a rank of a pool between two tests."""

from __future__ import annotations

import gc

import torch.distributed as dist

from megatron.zerobubble.mcore.compat import destroy_model_parallel


def destroy_groups() -> None:
    """Destroy every process group but the world, and what still refers to one: gloo keeps threads and sockets for each, and
    megatron-core only drops its own references. Those that a cycle still holds are freed by the pool, after the test."""
    gc.collect()
    destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
