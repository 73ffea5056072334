"""Gradients that stay sharded over the data-parallel ranks while the pipeline accumulates them (ZeRO-2, arXiv 1910.02054).

megatron-core's DDP keeps the full gradient of a chunk from the first microbatch to the optimizer step: every microbatch adds to
it. With B and W split, the Ws of several microbatches can run weight by weight. So a bucket's full gradient exists only while one
group of Ws adds to it:

    W of group:   open          wgrad GEMMs, per weight and microbatch   all weights done
    memory:       [full bucket, zeros] ------------------------------->  reduce-scatter  ->  shard += own part, bucket freed

What remains is the rank's shard of every bucket, with which the distributed optimizer steps. Gradients that B computes (norms,
biases, embeddings) stay full and are reduced with the last group. Each group costs a reduce-scatter of the full gradient:
ceil(m / k) per step for groups of k microbatches. See docs/adr/0014.

Numerics: with one group of all microbatches, the sums have the same bits as with ZeRO-1. With smaller groups, each group is
reduced over the ranks before the next one is added, which differs by rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.model.wgrad_split import deferring_modules
from megatron.zerobubble.optimizer.parts import parts_of
from megatron.zerobubble.wgrad.split_weight import SplitWeight

# torch 2.13 renamed the collective and warns at every call of the old name, the only one in older releases.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MAX_IN_FLIGHT = 1
"""Reduce-scatters that may be in flight while the next bucket is filled. On CUDA the compute stream waits for earlier ones."""

Watch = Callable[[int, int], Callable[[Any], Any] | None]
"""(bucket index, bytes) -> a function that wraps the reduction's handle, or None. Called right before a reduction is issued."""


class _Bucket:
    """One bucket of DDP, of which this rank keeps its shard."""

    def __init__(self, bucket: Any, index: int, group: dist.ProcessGroup, splits: dict[int, SplitWeight], index_map: Any) -> None:
        self.index = index
        self.group = group
        self.scale = bucket.gradient_scaling_factor
        self.numel = bucket.grad_data.numel()
        self.dtype, self.device = bucket.grad_data.dtype, bucket.grad_data.device
        self.shard = torch.zeros(self.numel // group.size(), dtype=self.dtype, device=self.device)
        self.ranges: dict[int, tuple[int, int]] = {}
        """id of a parameter -> (start, end) of its gradient in the bucket."""
        self.in_backward: list[Any] = []
        """Parameters whose gradients B computes: each has a ``main_grad`` of its own."""
        self.in_w: list[Any] = []
        """Parameters whose gradients W computes."""
        for parameter in bucket.params_list:
            start, end, _ = index_map[parameter]
            self.ranges[id(parameter)] = start - bucket.offset, end - bucket.offset
            if id(parameter) in splits:
                self.in_w.append(parameter)
                del parameter.main_grad  # exists only during W: reading it must fail, not read another tensor's memory
            else:
                parameter.main_grad = torch.zeros(parameter.shape, dtype=self.dtype, device=self.device)
                self.in_backward.append(parameter)
        self.full: Tensor | None = None
        """The full gradient, flat, while a group of Ws adds to it."""
        self.num_added = 0
        """Parameters whose W of the current group is done."""
        self.has_backward = False
        """Whether the gradients of B have been reduced."""

    @property
    def num_split(self) -> int:
        """Number of parameters whose gradients W computes in this iteration: those that are not frozen."""
        return sum(parameter.requires_grad for parameter in self.in_w)

    def view(self, parameter: Any) -> Tensor:
        """A view of the full bucket with the gradient of `parameter`, in its shape."""
        assert self.full is not None
        start, end = self.ranges[id(parameter)]
        return self.full[start:end].view(parameter.shape)

    def reset(self) -> None:
        """Zero the gradients, for a new iteration."""
        self.shard.zero_()
        for parameter in self.in_backward:
            parameter.main_grad.zero_()
        self.full, self.num_added, self.has_backward = None, 0, False


class _Reduction:
    """A reduce-scatter in flight.

    Keeps its input and output until the current stream has waited for it, so that the allocator cannot reuse their memory
    earlier.
    """

    __slots__ = ("bucket", "full", "handle", "part")

    def __init__(self, bucket: _Bucket, full: Tensor, part: Tensor, handle: Any) -> None:
        self.bucket, self.full, self.part, self.handle = bucket, full, part, handle

    def finish(self) -> None:
        """Wait, and add the result to the shard."""
        self.handle.wait()
        self.bucket.shard.add_(self.part)


class Reductions:
    """The reduce-scatters in flight of all chunks of a rank. `_MAX_IN_FLIGHT` is for all chunks together."""

    def __init__(self) -> None:
        self._in_flight: list[_Reduction] = []

    def started(self, reduction: _Reduction) -> None:
        """Add a reduction that has been issued."""
        self._in_flight.append(reduction)

    def finish(self, leave: int) -> None:
        """Wait for the oldest reductions until only `leave` are in flight."""
        while len(self._in_flight) > leave:
            self._in_flight.pop(0).finish()

    def clear(self) -> None:
        """Drop the reductions of an aborted iteration."""
        self._in_flight.clear()


class ShardedGradientsDDP(DistributedDataParallel):
    """megatron-core's DDP without its full gradient buffer. Weights, their all-gather and the layout of shards are unchanged.

    It is driven by the Ws of the `WeightGradStore`: a split weight gets its ``main_grad`` before its W, and its gradient is
    reported after it. Gradients reported inside of `no_sync` may still grow; those reported outside are final.

    Args:
        config: the module's TransformerConfig.
        ddp_config: must use the distributed optimizer.
        module: one chunk, split into B and W.
        splits: its split weights.
        reductions: of this rank, shared by its chunks.
        pg_collection: process groups with which DDP makes buckets, see `ddp.wrap.with_buckets`.

    Raises:
        ConfigError: an option that needs full gradients.
    """

    def __init__(
        self,
        *,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        splits: Sequence[SplitWeight],
        reductions: Reductions,
        pg_collection: Any,
    ) -> None:
        _check_options(config, ddp_config, module)
        bucketed = dataclasses.replace(ddp_config, overlap_grad_reduce=True)  # otherwise DDP makes one bucket
        super().__init__(config=config, ddp_config=bucketed, module=module, pg_collection=pg_collection)
        for group in self.bucket_groups:
            group.is_last_microbatch = False  # always: DDP itself reduces nothing
        self._is_final = True
        self.reductions = reductions
        self._buckets = self._shard({id(split.weight): split for split in splits})
        self._bucket_of = {key: bucket for bucket in self._buckets for key in bucket.ranges}
        for split in splits:
            split.position = self._bucket_of[id(split.weight)].index
            split.before = [partial(self._open, split.weight)]
            split.hooks[:] = [partial(self._added, split.weight)]
        self.watch: Watch | None = None
        """Called for every reduction, if not None."""

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shard of each bucket, flat."""
        return [bucket.shard for bucket in self._buckets]

    def gradient_shard(self, parameter: nn.Parameter, start: int, end: int) -> Tensor:
        """Elements start..end of this rank's shard of the bucket that holds `parameter`; a view."""
        return self._bucket_of[id(parameter)].shard[start:end]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which reported gradients may still grow, so that B's are not reduced."""
        self._is_final = False
        try:
            yield
        finally:
            self._is_final = True

    def zero_grad_buffer(self) -> None:
        """Zero the shards, and the gradients that B computes. Call it at the start of each iteration."""
        for parameter in self.params_with_grad:
            parameter.grad_added_to_main_grad = False
        self.reductions.clear()
        for bucket in self._buckets:
            bucket.reset()

    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing: reductions start when groups of Ws are complete."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce the remaining buckets (gradients of B alone, weights that were not used), and wait for all reductions.

        Args:
            force_all_reduce: not supported.

        Raises:
            ConfigError: `force_all_reduce` is True.
        """
        if force_all_reduce:
            raise ConfigError("force_all_reduce needs full gradients on every rank, which do not exist with sharded gradients")
        self._is_final = True
        for bucket in self._buckets:
            if bucket.full is None and bucket.has_backward:
                continue
            if bucket.full is None:
                self._make(bucket)
            self._reduce(bucket)
        self.reductions.finish(0)
        for group in self.bucket_groups:
            group.param_gather_dispatched = False  # the step that follows changes the weights

    def scale_gradients(self, scaling_factor: float) -> None:
        """Scale the shards."""
        for bucket in self._buckets:
            bucket.shard *= scaling_factor

    def _shard(self, splits: dict[int, SplitWeight]) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                buckets.append(_Bucket(bucket, len(buckets), buffer.data_parallel_group, splits, buffer.param_index_map))
            # Free the memory only: DDP and the optimizer compute the layout of shards from these tensors.
            buffer.grad_data.untyped_storage().resize_(0)
        return buckets

    def _open(self, weight: Any) -> None:
        bucket = self._bucket_of[id(weight)]
        if bucket.full is None:
            self._make(bucket)
        weight.main_grad = bucket.view(weight)

    def _added(self, weight: Any) -> None:
        bucket = self._bucket_of[id(weight)]
        del weight.main_grad
        bucket.num_added += 1
        if bucket.num_added == bucket.num_split:
            self._reduce(bucket)

    def _make(self, bucket: _Bucket) -> None:
        self.reductions.finish(_MAX_IN_FLIGHT)
        bucket.full = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)

    def _reduce(self, bucket: _Bucket) -> None:
        full, bucket.full, bucket.num_added = bucket.full, None, 0
        assert full is not None
        if self._is_final and not bucket.has_backward:
            bucket.has_backward = True
            for parameter in bucket.in_backward:
                start, end = bucket.ranges[id(parameter)]
                full[start:end].copy_(parameter.main_grad.view(-1))
        if bucket.scale != 1.0:
            full *= bucket.scale
        part = torch.empty_like(bucket.shard)
        operation = dist.ReduceOp.AVG if self.ddp_config.average_in_collective else dist.ReduceOp.SUM
        wrap = None if self.watch is None else self.watch(bucket.index, full.nbytes)
        handle = _reduce_scatter(part, full, op=operation, group=bucket.group, async_op=True)
        self.reductions.started(_Reduction(bucket, full, part, handle if wrap is None else wrap(handle)))


def _check_options(config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> None:
    """Raise ConfigError for an option that needs the full gradient of a weight."""
    why = None
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not ddp_config.use_distributed_optimizer:
        why = "the optimizer state must be sharded, too: --use-distributed-optimizer"
    elif ddp_config.num_distributed_optimizer_instances > 1:
        why = "several instances of the distributed optimizer all-reduce their shards once per step"
    elif any(getattr(each, "share_embeddings_and_output_weights", False) for each in module.modules()):  # on every stage alike
        why = "tied embeddings all-reduce their full gradients between two stages: --untie-embeddings-and-output-weights"
    elif config.mtp_num_layers:
        why = "MTP layers all-reduce the full gradient of their embedding between two stages (mtp_num_layers)"
    elif not all(getattr(parameter, "allreduce", True) for parameter in parameters):
        why = "experts have buckets of their own, which are not sharded"
    elif config.tensor_model_parallel_size > 1 and (config.sequence_parallel or config.qk_layernorm):
        why = "norms' gradients are all-reduced over tensor-parallel ranks afterwards (--sequence-parallel, --qk-layernorm)"
    elif any(deferring_modules(module)):
        why = "modules that defer weight gradients themselves (--transformer-impl transformer_engine) add to full gradients"
    if why is not None:
        raise ConfigError(f"gradients cannot be sharded while they are accumulated (--zero-bubble-shard-gradients): {why}")


def step_on_shards(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Make a distributed optimizer copy its gradients from the shards of those `chunks` that are `ShardedGradientsDDP`.

    Call it once, after the optimizer has been built. megatron-core's own code reads the rank's range of every full ``main_grad``,
    which does not exist here.

    Args:
        optimizer: what `get_megatron_optimizer` returned.
        chunks: this rank's chunks, wrapped by DDP.

    Raises:
        ConfigError: a precision-aware optimizer.
    """
    sharded = [chunk for chunk in chunks if isinstance(chunk, ShardedGradientsDDP)]
    if not sharded:
        return
    owners = {id(parameter): chunk for chunk in sharded for parameter in chunk.params_with_grad}
    for part in parts_of(optimizer):
        if getattr(part.config, "use_precision_aware_optimizer", False):
            raise ConfigError("--use-precision-aware-optimizer does not go with --zero-bubble-shard-gradients; leave one out")
        part._copy_model_grads_to_main_grads = partial(_copy_shards, part, owners)


def _copy_shards(part: Any, owners: dict[int, ShardedGradientsDDP]) -> None:
    """As `DistributedOptimizer._copy_model_grads_to_main_grads`, from shards."""
    if part.is_stub_optimizer:
        return
    groups = (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    )
    for model_groups, main_groups in groups:
        for model_group, main_group in zip(model_groups, main_groups, strict=True):
            for parameter, main in zip(model_group, main_group, strict=True):
                local = part._get_model_param_range_map(parameter)["gbuf_local"]
                main.grad = owners[id(parameter)].gradient_shard(parameter, local.start, local.end).float()
