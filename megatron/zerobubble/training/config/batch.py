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
    """Samples per microbatch and data-parallel rank."""
    global_batch_size: int | None = None
    """Samples per iteration. Default: one microbatch per data-parallel rank."""
    rampup_batch_size: tuple[int, ...] = field(default=(), metadata={"metavar": "N"})
    """Three numbers: samples of the first iterations, how many are added at a time, and after how many samples in all the
    iterations have --global-batch-size. The learning rate goes by samples, so small iterations advance it less."""

    def __post_init__(self) -> None:
        positive(self, "micro_batch_size", "global_batch_size")
        if self.rampup_batch_size and (len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1):
            raise ConfigError(
                f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))} must be three numbers above 0: "
                "first batch size, increment, and samples until the last one"
            )
