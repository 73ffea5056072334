"""Wrapping a rank's chunks for data parallelism: buckets on every rank, and gathers that start before they are waited for.

megatron-core cuts gradients into buckets only in the first chunk of the first pipeline rank, because under 1F1B the others end
earlier and wait for it anyway. Zero-bubble schedules leave nobody that slack: all ranks end together, or, with steps taken early,
each goes on to its own optimizer. A chunk with one bucket would start its reduction when its last W is over, and wait for the
whole of it; and it would gather all of its weights in front of its first forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron.zerobubble.mcore.ddp.zero2 import Reductions, ShardedGradientsDDP
from megatron.zerobubble.mcore.model.wgrad_split import split_weights


def wrap_chunks(
    models: Sequence[nn.Module],
    *,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    is_stock: bool,
    shards_gradients: bool = False,
) -> list[DistributedDataParallel]:
    """Each chunk in DistributedDataParallel. All ranks must call it.

    Args:
        models: this rank's chunks.
        config: the chunks' TransformerConfig.
        ddp_config: how gradients are accumulated and reduced.
        is_stock: megatron-core schedules; buckets are where it wants them.
        shards_gradients: gradients stay sharded while they are accumulated.
    """
    reductions = Reductions() if shards_gradients else None
    chunks = [
        _wrapped(model, config, ddp_config, disable_bucketing=is_stock and chunk > 0, is_stock=is_stock, reductions=reductions)
        for chunk, model in enumerate(models)
    ]
    for chunk in chunks:
        take_turns_by_bucket(chunk)
        _count_padding(chunk)
    return chunks


def _wrapped(
    model: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    *,
    disable_bucketing: bool,
    is_stock: bool,
    reductions: Reductions | None,
) -> DistributedDataParallel:
    groups = None if is_stock else bucketed_groups()
    if reductions is not None:
        return ShardedGradientsDDP(
            config=config,
            ddp_config=ddp_config,
            module=model,
            splits=split_weights(model),
            reductions=reductions,
            pg_collection=groups,
        )
    return DistributedDataParallel(
        config=config, ddp_config=ddp_config, module=model, disable_bucketing=disable_bucketing, pg_collection=groups
    )


def bucketed_groups() -> Any:
    """megatron-core's process groups, with which DDP makes buckets on this rank."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = _FirstOfItsPipeline()
    return groups


class _FirstOfItsPipeline:
    """What DDP asks the pipeline's group: whether this is the rank that has buckets. It communicates over other groups."""

    def rank(self) -> int:
        return 0


def take_turns_by_bucket(chunk: Any) -> None:
    """Within a W, weights take their turns as their buckets do: a bucket is complete before the next one is begun."""
    turns = {id(parameter): turn for turn, group in enumerate(chunk.bucket_groups) for parameter in group.params}
    for split in split_weights(chunk):
        split.position = turns.get(id(split.weight), len(turns))


def _count_padding(chunk: Any) -> None:
    """Let the padding at the end of buckets count as data.

    megatron-core 0.16.1 saves optimizer state from a copy of the buffer without that padding, but looks for each parameter where
    it lies with it: behind a padded bucket every parameter would be saved with its neighbour's state.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def start_first_gathers(chunks: Sequence[Any]) -> None:
    """With --overlap-param-gather: gather each chunk's first bucket now, while the rank waits for its first activation.

    The bucket's forward hook would start the gather and wait for it at once; from there on each bucket starts the next one. Call
    it when forwards are about to begin, on every rank of the data-parallel group at the same point. Buckets whose weights are
    in place, or on their way, are left alone.
    """
    for chunk in chunks:
        if not getattr(chunk, "remove_forward_pre_hook_handles", None):  # nothing overlaps, or evaluation has gathered already
            continue
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            if groups and not groups[-1].param_gather_dispatched:  # buckets are in reverse order of the model
                groups[-1].start_param_sync()
