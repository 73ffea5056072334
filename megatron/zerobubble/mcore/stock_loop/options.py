"""Which schedule a stock loop runs, and how it is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.microbatches.length_exchange import TokensOf
from megatron.zerobubble.mcore.replanner import Window
from megatron.zerobubble.mcore.state_memory import usable_bytes
from megatron.zerobubble.mcore.stock_loop.optimistic_steps import PostValidationOptions
from megatron.zerobubble.plan.registry import schedule_info
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec

__all__ = ["ByteLimit", "StockLoopOptions"]


@dataclass(frozen=True, kw_only=True)
class ByteLimit:
    """A memory limit per rank in bytes. It takes effect when passes, and the optimizer's state, have been measured."""

    total_bytes: int | None
    """Weights, gradients, optimizer state and activations; None: what the device has."""
    ranks_on_host: int
    """Ranks that share the machine, and on the CPU its memory."""

    def headroom_bytes(self, device: torch.device, taken: int) -> int:
        """Bytes left for activations where `taken` are in use."""
        total = self.total_bytes or usable_bytes(device, ranks_on_host=self.ranks_on_host)
        return total - taken


@dataclass(frozen=True, kw_only=True)
class StockLoopOptions:
    """Which schedule a stock loop runs, and how it is planned."""

    schedule: str
    """A name of `megatron.zerobubble.plan.registry`."""
    spec_of: Callable[[int, int], ScheduleSpec]
    """(pipeline ranks, chunks per rank) -> that schedule with its limits. Raises ConfigError."""
    timed: Window | None = None
    """Training iterations, counted from the first one after `install`, that are profiled for re-planning; None: none."""
    planning_seconds: float = 10.0
    """About how long one rank then searches for a better order."""
    p2p_max_ctas: int | None = None
    """Most CTAs of a transfer between stages on NCCL; None leaves it to NCCL."""
    torch_attention: bool = False
    """Whether torch's attention replaces megatron-core's own."""
    post_validation: PostValidationOptions | None = None
    """How optimizer steps are taken optimistically; None: by megatron-core's own `step`."""
    microbatch_tokens: TokensOf | None = None
    """Length of a microbatch of the loop's data; None: all have the sequence length of the schedule's call."""
    reorder_microbatches: bool = True
    """Whether microbatches of unequal length may run in another order than that in which they come."""
    memory_limit: ByteLimit | None = None
    """Most memory per rank, with weights, gradients and optimizer state; None: no limit in bytes."""
    weights_seed: int | None = None
    """Seed of first weights that are drawn by name (`named_weights`); None: as megatron-core drew them."""

    dropout_seed: int | None = None
    """Seed of dropout masks that are drawn by layer and sample (`layout_dropout`); None: as megatron-core draws them."""

    @property
    def is_v(self) -> bool:
        """Whether the first and the last stage are on the same rank."""
        return schedule_info(self.schedule).placement == "V"

    def spec(self, *, num_ranks: int, num_chunks: int | None) -> ScheduleSpec:
        """The schedule for a pipeline of this size.

        Args:
            num_ranks: p.
            num_chunks: v, as the loop chose it; None is 1.

        Raises:
            ConfigError: the schedule cannot run with these sizes; the message names those that the loop must be started with.
        """
        if num_ranks < 2:
            raise ConfigError(
                f"schedule {self.schedule} fills the bubble between pipeline ranks and needs a pipeline_model_parallel_size "
                f"of at least 2, got {num_ranks}; do not install it, or start more pipeline ranks"
            )
        info, given = schedule_info(self.schedule), num_chunks or 1
        if info.placement == "W":
            raise ConfigError(
                f"schedule {self.schedule} runs in this project's own training loop only; choose zbv or zb-interleaved here"
            )
        wanted = info.num_chunks if info.num_chunks is not None else max(2, given)
        if given != wanted:
            raise ConfigError(
                f"schedule {self.schedule} has {wanted} model chunk(s) per rank, the loop was started with "
                f"virtual_pipeline_model_parallel_size {num_chunks}: give {wanted if wanted > 1 else None} there and in "
                "initialize_model_parallel, and build the chunks as for megatron-core's interleaved schedule (a V has two chunks "
                "per rank, zb-interleaved any number from two)"
            )
        return self.spec_of(num_ranks, wanted)
