"""Length of the run, evaluation, early exit and seed: the flags of the group "Run control"."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.training.config.require import not_negative, positive

__all__ = ["RunConfig"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run control."""

    train_iters: int
    """Iterations to train."""
    eval_interval: int = 1000
    """Iterations between evaluations; there is one at the end, too."""
    eval_iters: int = 100
    """Global batches per evaluation; 0 does not evaluate. Every evaluation reads the same samples."""
    exit_interval: int | None = None
    """Save and leave after an iteration divisible by this."""
    exit_duration_in_mins: float | None = None
    """Save and leave after the iteration behind the first one that ends later than this."""
    exit_signal_handler: bool = False
    """On SIGTERM finish the next iteration, save, and leave without a last evaluation."""
    skip_train: bool = False
    """Load, evaluate and leave."""
    seed: int = 1234
    """Seed of weights, data order and dropout."""
    check_for_nan_in_loss_and_grad: bool = True
    """Train on when loss or gradient norm is not finite. Without it the run stops there."""

    def __post_init__(self) -> None:
        positive(self, "train_iters", "eval_interval", "exit_interval", "exit_duration_in_mins", "seed")
        not_negative(self, "eval_iters")
