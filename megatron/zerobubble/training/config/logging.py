"""Progress lines, metrics files and timers: the flags of the group "Logging"."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import positive

__all__ = ["LoggingConfig"]


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: int = 100
    """Iterations between progress lines in the log."""
    log_throughput: bool = False
    """Add the model's TFLOP/s per GPU to the progress lines. Recomputation does not count, and of the scores of causal attention
    half do."""
    metrics_jsonl: str | None = field(default=None, metadata={"metavar": "FILE"})
    """File to write one JSON object per iteration to, with its loss, learning rate and time. Objects are written at every
    progress line; means over its iterations, such as auxiliary losses, are in the last one. A continued run appends."""
    log_num_zeros_in_grad: bool = False
    """Count the zeros in the gradients and log their number."""
    timing_log_level: int = 0
    """Granularity of the timers: 0 times whole iterations, 1 adds the phases of an iteration, 2 adds every forward and backward
    pass (on CUDA under megatron-core's own schedules only: each would wait for the whole device)."""

    def __post_init__(self) -> None:
        positive(self, "log_interval")
        if self.timing_log_level not in (0, 1, 2):
            raise ConfigError(f"--timing-log-level {self.timing_log_level} must be 0, 1 or 2")
