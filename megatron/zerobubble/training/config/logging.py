"""Progress lines and metrics files: the flags of the group "Logging"."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.zerobubble.flags.require import positive

__all__ = ["LoggingConfig"]


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: int = 100
    """Iterations between progress lines in the log."""
    metrics_jsonl: str | None = field(default=None, metadata={"metavar": "FILE"})
    """File to write one JSON object per iteration to, with its loss, learning rate and time. Objects are written at every
    progress line. A continued run appends."""

    def __post_init__(self) -> None:
        positive(self, "log_interval")
