"""Microbatch and global batch size: the flags of the group "Batch"."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, positive

__all__ = ["BatchConfig", "iterations_of"]

_LONGEST_RAMP_UP = 1_000_000
"""Iterations of a ramp-up, which are counted one by one."""


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
        at_most(self, 2**31 - 1, "micro_batch_size", "global_batch_size")
        if self.rampup_batch_size and (len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1):
            raise ConfigError(
                f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))} must be three numbers above 0: "
                "start batch size, increment, and samples until --global-batch-size is reached"
            )
        if self.rampup_batch_size and self.rampup_batch_size[2] // self.rampup_batch_size[0] > _LONGEST_RAMP_UP:
            raise ConfigError(
                f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))} lasts more than {_LONGEST_RAMP_UP:,} "
                "iterations; give fewer samples or a larger start batch size"
            )


def iterations_of(samples: int, global_batch_size: int, rampup: tuple[int, ...] = ()) -> int:
    """How many whole iterations `samples` fill.

    Args:
        samples: samples of the run, --train-samples.
        global_batch_size: samples per iteration, after the ramp-up.
        rampup: --rampup-batch-size: first batch size, increment, and samples until the last; empty: no ramp-up.
    """
    iterations = consumed = 0
    if rampup:
        first, increment, over = rampup
        per_increment = over / ((global_batch_size - first) // increment)
        while consumed <= over:  # megatron-core's calculator: a batch belongs to the step in which it begins
            batch = min(global_batch_size, first + increment * int(consumed / per_increment))
            if consumed + batch > samples:
                return iterations
            consumed += batch
            iterations += 1
    return iterations + (samples - consumed) // global_batch_size
