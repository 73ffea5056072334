"""Microbatch and global batch size: the flags of the group "Batch"."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.require import positive

__all__ = ["BatchConfig"]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch."""

    micro_batch_size: int
    """Samples per microbatch."""
    global_batch_size: int | None = None
    """Samples per iteration, over all microbatches and data-parallel ranks. Default: one microbatch per data-parallel rank."""
    rampup_batch_size: tuple[int, ...] = field(default=(), metadata={"metavar": "N"})
    """Batch size ramp-up, three numbers: the global batch size of the first iterations, its increment, and the number of samples
    after which it reaches --global-batch-size. The learning rate schedule counts samples, so small batches advance it less.
    Default: no ramp-up."""

    def __post_init__(self) -> None:
        positive(self, "micro_batch_size", "global_batch_size")
        if self.rampup_batch_size and (len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1):
            raise ConfigError(
                f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))} must be three numbers above 0: "
                "start batch size, increment, and samples until --global-batch-size is reached"
            )
