"""Progress lines, metrics files and timers: the flags of the group "Logging"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.require import positive

__all__ = ["LoggingConfig"]


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: int = 100
    """Iterations between progress lines."""
    metrics_jsonl: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Append one JSON object per iteration, written at every progress line; means over its iterations are in the last one."""
    tensorboard_dir: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Write TensorBoard events."""
    wandb_project: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Log to this project of Weights & Biases, which has to be installed."""
    wandb_exp_name: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Name of the run there."""
    wandb_save_dir: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Where it keeps its files. Default: ./wandb."""
    log_num_zeros_in_grad: bool = False
    """Count and log zeros in the gradients."""
    timing_log_level: int = 0
    """0 times iterations; 1 adds the phases of an iteration; 2 adds every pass."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """What timers say about the ranks."""

    def __post_init__(self) -> None:
        positive(self, "log_interval")
        if self.wandb_project is None and (self.wandb_exp_name is not None or self.wandb_save_dir is not None):
            raise ConfigError("--wandb-exp-name and --wandb-save-dir need --wandb-project NAME")
        if self.timing_log_level not in (0, 1, 2):
            raise ConfigError(f"--timing-log-level {self.timing_log_level} must be 0, 1 or 2")
