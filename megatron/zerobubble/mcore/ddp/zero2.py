"""Gradients that stay sharded over the data-parallel ranks while the pipeline accumulates them (ZeRO-2, arXiv 1910.02054).

megatron-core's DDP keeps the whole gradient of a chunk from the first microbatch to the optimizer: every microbatch adds to it.
Here W is apart from B, and the Ws of several microbatches can run weight by weight. So a bucket's whole gradient exists only
while one group of Ws adds to it:

    W of group:   open          dY^T X of each weight and microbatch     all weights done
    memory:       [full bucket, zeros] ------------------------------->  reduce-scatter  ->  shard += own part, bucket freed

What is kept is the rank's shard of every bucket, which is what the distributed optimizer steps on. Gradients that B computes
(norms, biases, embeddings) are kept whole and join the last group. Each group costs a reduction of the whole gradient:
ceil(m / k) a step for groups of k. See docs/adr/0014.

Sums: with one group of all microbatches they are taken as by ZeRO-1, to the bit. With smaller ones each group is summed over the
ranks before the next one is added, which differs by rounding.
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
from megatron.zerobubble.wgrad.split_weight import SplitWeight

# torch 2.13 renamed the collective and warns at every call of the old name, which older releases alone have.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TRAVELLING = 1
"""Buckets that may be on their way while the next one is added to. On CUDA the compute stream waits for the one before."""

Watch = Callable[[int, int], Callable[[Any], Any] | None]
"""(bucket, bytes) -> what to pass the reduction's handle through, or None. Called right before a reduction is issued."""


class _Bucket:
    """One bucket of DDP's, of which this rank keeps its shard."""

    def __init__(self, bucket: Any, index: int, group: dist.ProcessGroup, splits: dict[int, SplitWeight], index_map: Any) -> None:
        self.index = index
        self.group = group
        self.scale = bucket.gradient_scaling_factor
        self.numel = bucket.grad_data.numel()
        self.dtype, self.device = bucket.grad_data.dtype, bucket.grad_data.device
        self.shard = torch.zeros(self.numel // group.size(), dtype=self.dtype, device=self.device)
        self.places: dict[int, tuple[int, int]] = {}
        """id of a parameter -> where its gradient is in the bucket."""
        self.whole: list[Any] = []
        """Parameters whose gradients B computes: each has a ``main_grad`` of its own."""
        self.num_split = 0
        for parameter in bucket.params_list:
            start, end, _ = index_map[parameter]
            self.places[id(parameter)] = start - bucket.offset, end - bucket.offset
            if id(parameter) in splits:
                self.num_split += 1
                del parameter.main_grad  # there is none outside of W: reading it is an error, and not somebody else's memory
            else:
                parameter.main_grad = torch.zeros(parameter.shape, dtype=self.dtype, device=self.device)
                self.whole.append(parameter)
        self.full: Tensor | None = None
        self.num_added = 0
        self.has_whole = False
        """Whether the gradients of B have been reduced."""

    @property
    def kept_bytes(self) -> int:
        """What is there all iteration."""
        return self.shard.nbytes + sum(parameter.main_grad.nbytes for parameter in self.whole)

    def view(self, parameter: Any) -> Tensor:
        """The place of a gradient in the whole bucket, in the parameter's shape."""
        assert self.full is not None
        start, end = self.places[id(parameter)]
        return self.full[start:end].view(parameter.shape)

    def reset(self) -> None:
        """Zeros, for a new iteration."""
        self.shard.zero_()
        for parameter in self.whole:
            parameter.main_grad.zero_()
        self.full, self.num_added, self.has_whole = None, 0, False


class _Reduction:
    """A bucket on its way. Holds what the collective reads and writes until the current stream has waited for it, so that the
    allocator cannot hand the memory on earlier."""

    __slots__ = ("bucket", "full", "handle", "part")

    def __init__(self, bucket: _Bucket, full: Tensor, part: Tensor, handle: Any) -> None:
        self.bucket, self.full, self.part, self.handle = bucket, full, part, handle

    @property
    def num_bytes(self) -> int:
        return self.full.nbytes + self.part.nbytes

    def settle(self) -> None:
        """Wait, and add to the shard."""
        self.handle.wait()
        self.bucket.shard.add_(self.part)


class Reductions:
    """What is on its way from all chunks of a rank: together they have `_TRAVELLING` buckets there, and not each as many."""

    def __init__(self) -> None:
        self._travelling: list[_Reduction] = []
        self._open: dict[int, int] = {}
        self.reduced_bytes = 0
        """Bytes of whole buckets that went into reductions so far."""
        self.peak_bytes = 0
        """Most that whole buckets, added to or on their way, ever took on this rank."""

    def opened(self, bucket: _Bucket) -> None:
        """The bucket has been given its whole gradient."""
        assert bucket.full is not None
        self._open[id(bucket)] = bucket.full.nbytes
        self._look()

    def sent(self, reduction: _Reduction) -> None:
        """The bucket's whole gradient is on its way."""
        self._open.pop(id(reduction.bucket), None)
        self._travelling.append(reduction)
        self.reduced_bytes += reduction.full.nbytes
        self._look()

    def settle(self, leave: int) -> None:
        """Wait, the oldest first, until only `leave` are left."""
        while len(self._travelling) > leave:
            self._travelling.pop(0).settle()

    def forget(self) -> None:
        """Let go of what an iteration that was given up left."""
        self._travelling.clear()
        self._open.clear()

    def _look(self) -> None:
        now = sum(self._open.values()) + sum(reduction.num_bytes for reduction in self._travelling)
        self.peak_bytes = max(self.peak_bytes, now)


class ShardedGradientsDDP(DistributedDataParallel):
    """megatron-core's DDP without its gradient buffer. Weights, their gathering and the layout of shards are as they were.

    The store's Ws drive it: a split weight asks for its accumulator before W and reports after it. While `no_sync` is entered a
    reported gradient may still grow; outside of it, it is final.

    Args:
        config: the module's TransformerConfig.
        ddp_config: must use the distributed optimizer.
        module: one chunk, split into B and W.
        splits: its split weights.
        reductions: the rank's, shared by its chunks.
        pg_collection: process groups, with which DDP makes buckets.

    Raises:
        ConfigError: gradients that someone else needs whole, by name.
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
        _refuse(config, ddp_config, module)
        buckets_wanted = dataclasses.replace(ddp_config, overlap_grad_reduce=True)
        super().__init__(config=config, ddp_config=buckets_wanted, module=module, pg_collection=pg_collection)
        for group in self.bucket_groups:
            group.is_last_microbatch = False  # for good: DDP itself reduces nothing
        self._is_final = True
        self.reductions = reductions
        self._buckets = self._shard({id(split.weight): split for split in splits})
        self._bucket_of = {key: bucket for bucket in self._buckets for key in bucket.places}
        for split in splits:
            split.position = self._bucket_of[id(split.weight)].index
            split.before = [partial(self._open, split.weight)]
            split.hooks[:] = [partial(self._added, split.weight)]
        self.watch: Watch | None = None
        """Sees every reduction, if given."""

    @property
    def kept_bytes(self) -> int:
        """What gradients take all iteration: shards, and those that B computes."""
        return sum(bucket.kept_bytes for bucket in self._buckets)

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shard of each bucket, flat."""
        return [bucket.shard for bucket in self._buckets]

    def gradient_shard(self, parameter: nn.Parameter, start: int, end: int) -> Tensor:
        """Elements start..end of this rank's shard of the bucket that holds `parameter`; a view."""
        return self._bucket_of[id(parameter)].shard[start:end]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients reported inside may still grow."""
        self._is_final = False
        try:
            yield
        finally:
            self._is_final = True

    def zero_grad_buffer(self) -> None:
        """Zero the shards, and the gradients of B; at the beginning of each iteration."""
        for parameter in self.params_with_grad:
            parameter.grad_added_to_main_grad = False
        self.reductions.forget()
        for bucket in self._buckets:
            bucket.reset()

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing: reductions start when groups of Ws are complete."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce what is left, buckets of gradients of B alone and of weights that were not used, and wait for every shard."""
        if force_all_reduce:
            raise ConfigError("force_all_reduce wants the whole gradient on every rank, which sharded gradients never have")
        self._is_final = True
        for bucket in self._buckets:
            if bucket.full is None and bucket.has_whole:
                continue
            if bucket.full is None:
                self._make(bucket)
            self._reduce(bucket)
        self.reductions.settle(0)
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
            # The tensors that DDP and the optimizer measure shards with stay, without memory.
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
        self.reductions.settle(_TRAVELLING)
        bucket.full = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self.reductions.opened(bucket)

    def _reduce(self, bucket: _Bucket) -> None:
        full, bucket.full, bucket.num_added = bucket.full, None, 0
        assert full is not None
        if self._is_final and not bucket.has_whole:
            bucket.has_whole = True
            for parameter in bucket.whole:
                start, end = bucket.places[id(parameter)]
                full[start:end].copy_(parameter.main_grad.view(-1))
        if bucket.scale != 1.0:
            full *= bucket.scale
        part = torch.empty_like(bucket.shard)
        operation = dist.ReduceOp.AVG if self.ddp_config.average_in_collective else dist.ReduceOp.SUM
        ended = None if self.watch is None else self.watch(bucket.index, full.nbytes)
        handle = _reduce_scatter(part, full, op=operation, group=bucket.group, async_op=True)
        self.reductions.sent(_Reduction(bucket, full, part, handle if ended is None else ended(handle)))


def _refuse(config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> None:
    """What needs the whole gradient of a weight at once."""
    why = None
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not ddp_config.use_distributed_optimizer:
        why = "the optimizer must be sharded, too: --use-distributed-optimizer"
    elif ddp_config.num_distributed_optimizer_instances > 1:
        why = "several instances of the distributed optimizer sum their shards once a step"
    elif any(getattr(each, "share_embeddings_and_output_weights", False) for each in module.modules()):  # on every stage alike
        why = "tied embeddings sum their whole gradients over two stages: --untie-embeddings-and-output-weights"
    elif config.mtp_num_layers:
        why = "MTP layers all-reduce the whole gradient of their embedding between two stages (mtp_num_layers)"
    elif not all(getattr(parameter, "allreduce", True) for parameter in parameters):
        why = "experts have buckets of their own, which are not sharded"
    elif config.tensor_model_parallel_size > 1 and (config.sequence_parallel or config.qk_layernorm):
        why = "norms' gradients are summed over tensor-parallel ranks after the reduction (--sequence-parallel, --qk-layernorm)"
    elif any(deferring_modules(module)):
        why = "modules that keep back weight gradients themselves (--transformer-impl transformer_engine) add them to whole ones"
    if why is not None:
        raise ConfigError(f"gradients cannot be sharded while they are accumulated (--zero-bubble-shard-gradients): {why}")


def step_on_shards(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Let a distributed optimizer take its gradients from the shards of `chunks`, where they are `ShardedGradientsDDP`.

    Call it once, when the optimizer has been built. megatron-core's own way reads the rank's range of every ``main_grad``, which
    here is nowhere whole.
    """
    sharded = [chunk for chunk in chunks if isinstance(chunk, ShardedGradientsDDP)]
    if not sharded:
        return
    owners = {id(parameter): chunk for chunk in sharded for parameter in chunk.params_with_grad}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part.config, "use_precision_aware_optimizer", False):
            raise ConfigError("--use-precision-aware-optimizer does not go with --zero-bubble-shard-gradients; leave one out")
        part._copy_model_grads_to_main_grads = partial(_copy_shards, part, owners)


def _copy_shards(part: Any, owners: dict[int, ShardedGradientsDDP]) -> None:
    """What `DistributedOptimizer._copy_model_grads_to_main_grads` does, from shards."""
    if part.is_stub_optimizer:
        return
    groups = (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    )
    for model_groups, main_groups in groups:
        for model_group, main_group in zip(model_groups, main_groups, strict=True):
            for parameter, main in zip(model_group, main_group, strict=True):
                place = part._get_model_param_range_map(parameter)["gbuf_local"]
                main.grad = owners[id(parameter)].gradient_shard(parameter, place.start, place.end).float()
