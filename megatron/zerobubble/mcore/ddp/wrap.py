"""Wrapping a rank's chunks with DDP: buckets on every rank, and all-gathers that start before a forward waits for them.

megatron-core splits gradients into buckets only in the first chunk of the first pipeline rank, because under 1F1B the other ranks
end earlier and have slack. With zero-bubble schedules they have none: all ranks end together, or, with optimistic steps, each one
goes on to its own optimizer step. A chunk with a single bucket would start its reduction after its last W, with nothing left to
overlap it, and all-gather all of its weights before its first forward.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.zerobubble.mcore.model.wgrad_split import driven_modules, split_weights


def with_buckets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of DistributedDataParallel, changed so that it makes buckets on every pipeline rank and in every chunk.

    Afterwards call `count_padding_as_data`: then checkpoints that store the optimizer's state by parameter are right.
    """
    given = arguments.get("pg_collection")
    groups = ProcessGroupCollection.use_mpu_process_groups() if given is None else copy.copy(given)
    groups.pp = _FirstPipelineRank()
    changed = {**arguments, "pg_collection": groups, "disable_bucketing": False}
    changed.pop("full_param_layout", None)  # computed for other buckets; DDP computes it, too
    return changed


class _FirstPipelineRank:
    """A pipeline group whose `rank()` is 0: DDP makes buckets on that rank only. DDP does not communicate over this group."""

    def rank(self) -> int:
        return 0


def order_wgrads_by_bucket(chunk: Any) -> None:
    """Order the wgrad GEMMs of a W by bucket, so that each bucket is complete before the next one is started."""
    positions = {id(parameter): index for index, group in enumerate(chunk.bucket_groups) for parameter in group.params}
    for deferred in (*split_weights(chunk), *driven_modules(chunk)):
        deferred.position = max(positions.get(id(weight), len(positions)) for weight in deferred.weights)


def overlaps_reductions(chunk: Any) -> bool:
    """Whether DDP reduces buckets of a chunk over replicas as soon as they are complete."""
    config = getattr(chunk, "ddp_config", None)
    groups = (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
    return bool(getattr(config, "overlap_grad_reduce", False)) and any(_num_replicas(group) > 1 for group in groups)


def _num_replicas(bucket_group: Any) -> int:
    group = getattr(bucket_group, "data_parallel_group", None) or getattr(
        bucket_group, "intra_distributed_optimizer_instance_group", None
    )
    return 1 if group is None else int(group.size())


def count_padding_as_data(chunk: Any) -> None:
    """Count the padding at the end of buckets as data, so that checkpoints of the optimizer state are right.

    megatron-core 0.16.1 saves optimizer state from a copy of the buffer without that padding, but indexes it by offsets that
    include it: after a padded bucket, every parameter would be saved with the state of another one.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def start_first_gathers(chunks: Sequence[Any]) -> None:
    """With --overlap-param-gather: start the all-gather of each chunk's first bucket.

    It overlaps with the wait for the rank's first activation. Otherwise the bucket's forward hook would start the all-gather and
    wait for it at once; each later bucket is started by the one before. Call it before the first forward, on every rank of the
    data-parallel group at the same point. Buckets whose weights are gathered, or in flight, are skipped.
    """
    for chunk in chunks:
        if not getattr(chunk, "remove_forward_pre_hook_handles", None):  # nothing overlaps, or evaluation has gathered already
            continue
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            if groups and not groups[-1].param_gather_dispatched:  # buckets are in reverse order of the model
                groups[-1].start_param_sync()
