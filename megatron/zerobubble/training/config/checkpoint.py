"""Saving and loading: the flags of the group "Checkpoints"."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.require import positive

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Where to write checkpoints, after --save-interval iterations and at the end."""
    save_interval: int | None = None
    """Iterations between checkpoints. Default: only at the end."""
    save_retain_interval: int | None = None
    """Keep checkpoints whose iteration is a multiple of this, and the latest; remove others once a newer one is complete.
    Default: keep all."""
    async_save: bool = False
    """Train on while a checkpoint is written from a copy in host memory, by a process beside each rank. At most one is under way;
    the next save and the end of the run wait for it."""
    load: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Continue from the latest checkpoint there. May be empty only if it is also the --save directory."""
    ckpt_step: int | None = None
    """Load this iteration instead of the latest."""
    exit_on_missing_checkpoint: bool = False
    """Leave where --load has no checkpoint, also if it is the --save directory, instead of starting from new weights."""
    finetune: bool = False
    """Load the weights only, and start at iteration 0."""
    save_optim: bool = True
    """Do not save the optimizer."""
    save_rng: bool = True
    """Do not save the random generators."""
    load_optim: bool = True
    """Do not load the optimizer."""
    load_rng: bool = True
    """Do not load the random generators."""

    def __post_init__(self) -> None:
        positive(self, "save_interval", "save_retain_interval", "ckpt_step")
        if self.save is None and (self.save_interval is not None or self.async_save):
            raise ConfigError("--save-interval and --async-save need --save DIR")
        if self.load is None and (self.ckpt_step is not None or self.finetune or self.exit_on_missing_checkpoint):
            raise ConfigError("--ckpt-step, --finetune and --exit-on-missing-checkpoint need --load DIR")
        if self.save_retain_interval is None:
            return
        if self.save_interval is None or self.save_retain_interval % self.save_interval:
            raise ConfigError(
                f"--save-retain-interval {self.save_retain_interval} must be a multiple of --save-interval "
                f"({'not given' if self.save_interval is None else self.save_interval}), or nothing would be kept"
            )
