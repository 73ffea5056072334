"""Saving and loading: the flags of the group "Checkpoints"."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron.zerobubble.errors import CheckpointError, ConfigError
from megatron.zerobubble.flags.require import positive

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Directory to write checkpoints to, every --save-interval iterations and at the end. Default: no checkpoints."""
    save_interval: int | None = None
    """Iterations between checkpoints. Default: one checkpoint, at the end."""
    load: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Directory to load the latest checkpoint from. It may have none only if it is also the --save directory. Default: start from
    newly initialized weights."""
    ckpt_step: int | None = None
    """Load the checkpoint of this iteration instead of the latest."""
    verify_checkpoint: bool = True
    """Do not compare the files of the checkpoint with its manifest before it is loaded. By default damaged, missing and foreign
    files are refused by name."""
    load_optim: bool = True
    """Do not load the optimizer state. By default it is loaded."""

    def __post_init__(self) -> None:
        positive(self, "save_interval", "ckpt_step")
        if self.save is None and self.save_interval is not None:
            raise ConfigError("--save-interval needs --save DIR")
        if self.load is None and self.ckpt_step is not None:
            raise ConfigError("--ckpt-step needs --load DIR")

    def check(self) -> None:
        """Raise CheckpointError if the checkpoint to load does not exist."""
        if self.load is None or self.ckpt_step is not None:
            return
        tracker = Path(self.load) / "latest_checkpointed_iteration.txt"
        resumes_itself = self.save is not None and Path(self.save) == Path(self.load)
        if not tracker.is_file() and not resumes_itself:
            raise CheckpointError(
                f"--load {self.load}: there is no checkpoint ({tracker.name} is missing); "
                "leave --load out to start from newly initialized weights"
            )
