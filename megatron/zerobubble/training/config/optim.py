"""Optimizer, learning rate and weight decay: the flags of the group "Optimizer and learning rate"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, not_negative, positive, within
from megatron.zerobubble.training.config.parallel import ParallelConfig
from megatron.zerobubble.training.config.run_control import RunConfig

__all__ = ["OptimConfig"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate.

    Warm-up and decay advance with every successful optimizer step, as in Megatron-LM; skipped steps do not count.
    """

    lr: float
    """Maximum learning rate, reached after warm-up."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer: AdamW (adam), or SGD with momentum (sgd)."""
    min_lr: float = 0.0
    """Minimum learning rate, at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "linear"
    """Learning rate decay function."""
    lr_decay_iters: int | None = None
    """Number of iterations over which the learning rate decays. Default: --train-iters."""
    lr_decay_samples: int | None = None
    """Number of samples over which the learning rate decays, in a run of --train-samples. Default: --train-samples."""
    lr_warmup_iters: int = 0
    """Number of iterations of linear learning rate warm-up."""
    lr_warmup_samples: int = 0
    """Number of samples of linear learning rate warm-up, in a run of --train-samples."""
    lr_warmup_fraction: float | None = None
    """Length of the learning rate warm-up as a fraction of --lr-decay-iters or --lr-decay-samples, instead of --lr-warmup-iters
    or --lr-warmup-samples."""
    lr_warmup_init: float = 0.0
    """Learning rate at the beginning of the warm-up."""
    weight_decay: float = 0.01
    """Weight decay coefficient; not applied to biases and normalization layers."""
    clip_grad: float = 1.0
    """Clip gradients to this global 2-norm; 0 disables clipping."""
    adam_beta1: float = 0.9
    """Adam's decay rate of the first moment (mean of gradients)."""
    adam_beta2: float = 0.999
    """Adam's decay rate of the second moment (mean of squared gradients)."""
    adam_eps: float = 1e-8
    """Adam's term in the denominator, for numerical stability."""
    sgd_momentum: float = 0.9
    """Momentum of --optimizer sgd."""
    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the global batch. By default it is averaged over the tokens of each microbatch, and
    microbatches weigh the same."""
    override_opt_param_scheduler: bool = field(default=False, metadata={"flag": "--override-opt_param-scheduler"})
    """When loading a checkpoint, use the learning rate and weight decay schedule of the flags."""

    def __post_init__(self) -> None:
        positive(self, "lr", "lr_decay_iters", "lr_decay_samples", "adam_eps")
        not_negative(self, "min_lr", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_init", "weight_decay", "clip_grad")
        at_most(self, 2**31 - 1, "lr_decay_iters", "lr_warmup_iters")
        at_most(self, 2**53, "lr_decay_samples", "lr_warmup_samples")
        within(self, 0.0, 1.0, "adam_beta1", "adam_beta2", "sgd_momentum", "lr_warmup_fraction")
        if self.min_lr > self.lr:
            raise ConfigError(f"--min-lr {self.min_lr} is larger than --lr {self.lr}")
        if self.lr_warmup_init > self.lr:
            raise ConfigError(f"--lr-warmup-init {self.lr_warmup_init} is larger than --lr {self.lr}")
        for flag, length in (("--lr-warmup-iters", self.lr_warmup_iters), ("--lr-warmup-samples", self.lr_warmup_samples)):
            if self.lr_warmup_fraction is not None and length:
                raise ConfigError(f"--lr-warmup-fraction and {flag} are both given; choose one")

    def check(self, parallel: ParallelConfig, run: RunConfig) -> None:
        """Raise ConfigError unless the optimizer's state can be sharded as requested, and all lengths have one unit."""
        if self.optimizer == "sgd" and parallel.use_distributed_optimizer:
            raise ConfigError("--use-distributed-optimizer shards Adam's state; leave it out with --optimizer sgd")
        other, unit = ("iters", "samples") if run.train_samples is not None else ("samples", "iters")
        for name in ("decay", "warmup"):
            if getattr(self, f"lr_{name}_{other}"):
                raise ConfigError(
                    f"--lr-{name}-{other} does not go with --train-{unit}: give --lr-{name}-{unit}, or --train-{other}"
                )
