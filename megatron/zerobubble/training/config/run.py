"""Length of the run, evaluation, early exit and seed: the flags of the group "Run control"."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.training.config.require import not_negative, positive

__all__ = ["RunConfig"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run control."""

    train_iters: int
    """Number of iterations to train."""
    eval_interval: int = 1000
    """Iterations between evaluations on validation samples; the last iteration is always followed by one."""
    eval_iters: int = 100
    """Global batches per evaluation; 0 disables evaluation. Every evaluation reads the same samples."""
    exit_interval: int | None = None
    """Save a checkpoint and exit after an iteration divisible by this number. Default: train all iterations."""
    exit_duration_in_mins: float | None = None
    """Save a checkpoint and exit once the run has lasted this many minutes; all ranks finish one more iteration first. Default:
    no limit."""
    exit_signal_handler: bool = False
    """On SIGTERM, finish the next iteration, save a checkpoint, and exit without a final evaluation (preemption)."""
    skip_train: bool = False
    """Only load a checkpoint and evaluate it; train and save nothing."""
    seed: int = 1234
    """Seed of weight initialization, data order and dropout."""
    check_for_nan_in_loss_and_grad: bool = True
    """Continue training after a loss or gradient norm that is not finite. By default the run stops."""

    def __post_init__(self) -> None:
        positive(self, "train_iters", "eval_interval", "exit_interval", "exit_duration_in_mins", "seed")
        not_negative(self, "eval_iters")
