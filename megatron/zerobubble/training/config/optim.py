"""Optimizer, learning rate and weight decay: the flags of the group "Optimizer and learning rate"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.require import not_negative, positive, within

__all__ = ["OptimConfig"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate.

    Iterations count here as they do in Megatron-LM: warm-up and decay advance with every successful step.
    """

    lr: float
    """Largest learning rate."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW, or SGD with momentum."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay."""
    lr_decay_iters: int | None = None
    """Iterations until the learning rate has decayed. Default: --train-iters."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a part of --lr-decay-iters, instead of --lr-warmup-iters."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """With WSD: shape of the annealing."""
    lr_wsd_decay_iters: int | None = None
    """With WSD: iterations of annealing."""
    decoupled_lr: float | None = None
    """Separate largest learning rate for the input and output layer."""
    decoupled_min_lr: float | None = None
    """Separate smallest learning rate for the input and output layer."""
    weight_decay: float = 0.01
    """Weight decay; not applied to biases and norms."""
    start_weight_decay: float | None = None
    """First weight decay, with --weight-decay-incr-style linear or cosine."""
    end_weight_decay: float | None = None
    """Last weight decay, with --weight-decay-incr-style linear or cosine."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay changes over the run."""
    clip_grad: float = 1.0
    """Clip gradients to this global norm; 0 does not clip."""
    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of Adam's mean of squares."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the global batch, instead of over microbatches of equal weight."""
    override_opt_param_scheduler: bool = field(default=False, metadata={"flag": "--override-opt_param-scheduler"})
    """On loading a checkpoint keep the learning rate schedule of the flags."""
    use_checkpoint_opt_param_scheduler: bool = field(default=False, metadata={"flag": "--use-checkpoint-opt_param-scheduler"})
    """On loading a checkpoint take its learning rate schedule, whatever the flags say."""

    def __post_init__(self) -> None:
        positive(self, "lr", "lr_decay_iters", "lr_wsd_decay_iters", "adam_eps", "decoupled_lr")
        not_negative(self, "min_lr", "lr_warmup_iters", "lr_warmup_init", "weight_decay", "clip_grad", "decoupled_min_lr")
        not_negative(self, "start_weight_decay", "end_weight_decay")
        within(self, 0.0, 1.0, "adam_beta1", "adam_beta2", "sgd_momentum", "lr_warmup_fraction")
        if self.min_lr > self.lr:
            raise ConfigError(f"--min-lr {self.min_lr} is larger than --lr {self.lr}")
        if self.lr_warmup_init > self.lr:
            raise ConfigError(f"--lr-warmup-init {self.lr_warmup_init} is larger than --lr {self.lr}")
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise ConfigError("--lr-warmup-fraction and --lr-warmup-iters are both given; choose one")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            raise ConfigError("--lr-decay-style WSD needs --lr-wsd-decay-iters")
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            raise ConfigError("--decoupled-min-lr needs --decoupled-lr")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError("--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict")
        self._check_weight_decay()

    def _check_weight_decay(self) -> None:
        ends = (self.start_weight_decay, self.end_weight_decay)
        if self.weight_decay_incr_style == "constant":
            if ends != (None, None):
                raise ConfigError("--start-weight-decay and --end-weight-decay need --weight-decay-incr-style")
        elif self.start_weight_decay is None or self.end_weight_decay is None:
            raise ConfigError(
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay"
            )
        elif self.start_weight_decay > self.end_weight_decay:
            raise ConfigError(
                f"--start-weight-decay {self.start_weight_decay} is larger than --end-weight-decay {self.end_weight_decay}"
            )
