"""Progress lines, metrics files and timers: the flags of the group "Logging"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
    tensorboard_dir: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Directory to write TensorBoard events to. Needs the package tensorboard."""
    wandb_project: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Weights & Biases project to log to. Needs the package wandb."""
    wandb_exp_name: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Name of the Weights & Biases run."""
    wandb_save_dir: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Directory for the local files of Weights & Biases. Default: ./wandb."""
    log_num_zeros_in_grad: bool = False
    """Count the zeros in the gradients and log their number."""
    timing_log_level: int = 0
    """Granularity of the timers: 0 times whole iterations, 1 adds the phases of an iteration, 2 adds every forward and backward
    pass (on CUDA under megatron-core's own schedules only: each would wait for the whole device)."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Statistic over ranks that timers log: the maximum, minimum and maximum, or the time of every rank."""

    log_timers_to_tensorboard: bool = False
    """Write the timers to TensorBoard: the maximum over ranks. Needs --tensorboard-dir and --timing-log-level 1 or 2."""
    log_memory_to_tensorboard: bool = False
    """Write the memory of rank 0 to TensorBoard: what torch's allocator has, or on the CPU the process. Needs
    --tensorboard-dir."""

    profile: bool = False
    """Profile the iterations after --profile-step-start up to --profile-step-end: with nsys, which must have started the job with
    --capture-range=cudaProfilerApi, or with --use-pytorch-profiler."""
    profile_step_start: int = 10
    """With --profile: iterations done when profiling starts."""
    profile_step_end: int = 12
    """With --profile: iterations done when profiling stops."""
    profile_ranks: tuple[int, ...] = field(default=(0,), metadata={"metavar": "RANK"})
    """With --profile: global ranks to profile."""
    use_pytorch_profiler: bool = False
    """With --profile: use torch's profiler, on GPUs and on the CPU. It writes its traces to --tensorboard-dir."""

    def __post_init__(self) -> None:
        positive(self, "log_interval")
        for flag, is_given in self._curves_asked_for().items():
            if is_given and self.tensorboard_dir is None:
                raise ConfigError(f"{flag} needs --tensorboard-dir DIR")
        if self.log_timers_to_tensorboard and self.timing_log_level == 0:
            raise ConfigError("--log-timers-to-tensorboard needs --timing-log-level 1 or 2: at level 0 no timer runs")
        if self.wandb_project is None and (self.wandb_exp_name is not None or self.wandb_save_dir is not None):
            raise ConfigError("--wandb-exp-name and --wandb-save-dir need --wandb-project NAME")
        if self.use_pytorch_profiler and not self.profile:
            raise ConfigError("--use-pytorch-profiler needs --profile")
        if not 0 <= self.profile_step_start < self.profile_step_end:
            raise ConfigError(
                f"--profile-step-start {self.profile_step_start} must be at least 0, and less than --profile-step-end "
                f"{self.profile_step_end}"
            )
        if self.timing_log_level not in (0, 1, 2):
            raise ConfigError(f"--timing-log-level {self.timing_log_level} must be 0, 1 or 2")

    def _curves_asked_for(self) -> dict[str, bool]:
        return {
            "--log-timers-to-tensorboard": self.log_timers_to_tensorboard,
            "--log-memory-to-tensorboard": self.log_memory_to_tensorboard,
            "--use-pytorch-profiler": self.use_pytorch_profiler,
        }
