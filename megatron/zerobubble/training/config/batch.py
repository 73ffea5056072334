"""Microbatch and global batch size: the flags of the group "Batch"."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.flags.require import at_most, positive

__all__ = ["BatchConfig"]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch."""

    micro_batch_size: int
    """Samples per microbatch."""
    global_batch_size: int | None = None
    """Samples per iteration, over all microbatches and data-parallel ranks. Default: one microbatch per data-parallel rank."""

    def __post_init__(self) -> None:
        positive(self, "micro_batch_size", "global_batch_size")
        at_most(self, 2**31 - 1, "micro_batch_size", "global_batch_size")
