"""Optimizer, learning rate and weight decay: the flags of the group "Optimizer and learning rate"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, not_negative, positive, within

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
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Learning rate decay function. WSD is warm-up, stable, decay: constant until the last --lr-wsd-decay-iters iterations."""
    lr_decay_iters: int | None = None
    """Number of iterations over which the learning rate decays. Default: --train-iters."""
    lr_decay_samples: int | None = None
    """With --train-samples: number of samples over which the learning rate decays. Default: --train-samples."""
    lr_warmup_iters: int = 0
    """Number of iterations of linear learning rate warm-up."""
    lr_warmup_samples: int = 0
    """With --train-samples: number of samples of linear learning rate warm-up."""
    lr_warmup_fraction: float | None = None
    """Length of the learning rate warm-up as a fraction of --lr-decay-iters or --lr-decay-samples, instead of --lr-warmup-iters
    or --lr-warmup-samples."""
    lr_warmup_init: float = 0.0
    """Initial learning rate of the warm-up."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """With --lr-decay-style WSD: decay function of the annealing phase."""
    lr_wsd_decay_iters: int | None = None
    """With --lr-decay-style WSD: number of iterations of the annealing phase."""
    lr_wsd_decay_samples: int | None = None
    """With --lr-decay-style WSD and --train-samples: number of samples of the annealing phase."""
    decoupled_lr: float | None = None
    """Separate maximum learning rate for the input and output layer. Default: --lr."""
    decoupled_min_lr: float | None = None
    """Separate minimum learning rate for the input and output layer, with --decoupled-lr. Default: --min-lr."""
    weight_decay: float = 0.01
    """Weight decay coefficient; not applied to biases and normalization layers."""
    start_weight_decay: float | None = None
    """Initial weight decay coefficient, with --weight-decay-incr-style linear or cosine."""
    end_weight_decay: float | None = None
    """Final weight decay coefficient, with --weight-decay-incr-style linear or cosine."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Function by which the weight decay increases over the run."""
    clip_grad: float = 1.0
    """Clip gradients to this global 2-norm; 0 disables clipping."""
    adam_beta1: float = 0.9
    """Adam's decay rate of the first moment (mean of gradients)."""
    adam_beta2: float = 0.999
    """Adam's decay rate of the second moment (mean of squared gradients)."""
    adam_eps: float = 1e-8
    """Adam's epsilon, added to the denominator."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the global batch. By default it is averaged over the tokens of each microbatch, and
    microbatches weigh the same."""
    override_opt_param_scheduler: bool = field(default=False, metadata={"flag": "--override-opt_param-scheduler"})
    """When loading a checkpoint, use the learning rate and weight decay schedule of the flags."""
    use_checkpoint_opt_param_scheduler: bool = field(default=False, metadata={"flag": "--use-checkpoint-opt_param-scheduler"})
    """When loading a checkpoint, use its learning rate and weight decay schedule instead of that of the flags."""

    def __post_init__(self) -> None:
        positive(self, "lr", "lr_decay_iters", "lr_wsd_decay_iters", "adam_eps", "decoupled_lr")
        positive(self, "lr_decay_samples", "lr_wsd_decay_samples")
        not_negative(
            self,
            "min_lr",
            "lr_warmup_iters",
            "lr_warmup_samples",
            "lr_warmup_init",
            "weight_decay",
            "clip_grad",
            "decoupled_min_lr",
        )
        not_negative(self, "start_weight_decay", "end_weight_decay")
        at_most(self, 2**31 - 1, "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
        at_most(self, 2**47, "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
        within(self, 0.0, 1.0, "adam_beta1", "adam_beta2", "sgd_momentum", "lr_warmup_fraction")
        if self.min_lr > self.lr:
            raise ConfigError(f"--min-lr {self.min_lr} is larger than --lr {self.lr}")
        if self.lr_warmup_init > self.lr:
            raise ConfigError(f"--lr-warmup-init {self.lr_warmup_init} is larger than --lr {self.lr}")
        for flag, value in (("iters", self.lr_warmup_iters), ("samples", self.lr_warmup_samples)):
            if self.lr_warmup_fraction is not None and value:
                raise ConfigError(f"--lr-warmup-fraction and --lr-warmup-{flag} are both given; choose one")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None and self.lr_wsd_decay_samples is None:
            raise ConfigError("--lr-decay-style WSD needs --lr-wsd-decay-iters, or with --train-samples --lr-wsd-decay-samples")
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            raise ConfigError("--decoupled-min-lr needs --decoupled-lr")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError("--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other")
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
