"""The GPT of the benchmarks with the distributed optimizer (ZeRO-1) or also sharded gradients (ZeRO-2); measures its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.mcore.ddp.zero2 import Reductions, ShardedGradientsDDP
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.profiling.profiler import Profiler
from tools.benchmarks.schedules.contenders import ContenderSpec, Sizes
from tools.benchmarks.schedules.gpt import GPTContender


class ShardingContender(GPTContender):
    """ZeRO-1, or gradients that are sharded between microbatches. Every rank must construct it at the same point.

    Args:
        contender: a contender of our runtime.
        sizes: sizes of the model.
        num_ranks: pipeline size.
        host: the installed host-device layer.
        group_size: number of microbatches whose Ws run together before their gradients are reduced; None is ZeRO-1.
        bucket_size: parameters per bucket.
    """

    def __init__(
        self, contender: ContenderSpec, sizes: Sizes, num_ranks: int, host: HostDevice, group_size: int | None, bucket_size: int
    ) -> None:
        self._group_size, self._bucket_size = group_size, bucket_size
        super().__init__(contender, sizes, num_ranks, host)

    def look(self, num_microbatches: int) -> dict[str, int]:
        """Run two iterations and measure the second one: bytes by kind."""
        self.iterate(num_microbatches)
        waiting, reduced = 0, 0 if self._reductions is None else self._reductions.reduced_bytes

        store = self._store
        assert store is not None

        def observe(work: Any, op: Any) -> None:
            nonlocal waiting
            waiting = max(waiting, store.pending_bytes)

        profiler = Profiler(torch.device("cpu"))
        self._schedule.hooks.observe, self._schedule.hooks.profiler = observe, profiler
        self.iterate(num_microbatches)
        self._schedule.hooks.observe = self._schedule.hooks.profiler = None
        passes = profiler.profile()
        kept = sum(self._kept(chunk) for chunk in self._chunks)
        whole = self._reductions.peak_bytes if self._reductions is not None else 0
        return {
            "gradients_kept": kept,
            "gradients_peak": kept + whole,
            "waiting_peak": waiting,
            "all_peak": kept + passes.most_bytes,
            "reduced": kept if self._reductions is None else self._reductions.reduced_bytes - reduced,
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters, by a name that is the same in every run."""
        return {
            f"{index}.{name}": parameter.detach().clone()
            for index, chunk in enumerate(self._chunks)
            for name, parameter in chunk.named_parameters()
        }

    def _batches(self, num_microbatches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Different microbatches on every data-parallel replica."""
        replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        return islice(super()._batches(replicas * num_microbatches), replica, None, replicas)

    def _kept(self, chunk: Any) -> int:
        if isinstance(chunk, ShardedGradientsDDP):
            return chunk.persistent_bytes
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in chunk.buffers)

    @property
    def _reductions(self) -> Reductions | None:
        return next((chunk.reductions for chunk in self._chunks if isinstance(chunk, ShardedGradientsDDP)), None)

    def _make_spec(self, contender: ContenderSpec, num_ranks: int) -> ScheduleSpec:
        return replace(super()._make_spec(contender, num_ranks), shard_gradients=self._group_size)

    def _ddp_config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            bucket_size=self._bucket_size,
        )

    def _optimizer_config(self) -> OptimizerConfig:
        return replace(super()._optimizer_config(), use_distributed_optimizer=True, adam_eps=1.0)
