"""How it is trained: batch, optimizer, data, run control, checkpoints, logging.

One frozen dataclass per group of flags; the docstring under a field is the flag's help text (see `flags`). Names, defaults
and meanings are Megatron-LM's. `__post_init__` checks what a group can check alone; `checks` does the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.require import not_negative, positive, within

__all__ = ["BatchConfig", "CheckpointConfig", "DataConfig", "LoggingConfig", "OptimConfig", "RunConfig"]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch."""

    micro_batch_size: int
    """Samples per microbatch and data-parallel rank."""
    global_batch_size: int | None = None
    """Samples per iteration. Default: one microbatch per data-parallel rank."""
    rampup_batch_size: tuple[int, ...] = field(default=(), metadata={"metavar": "N"})
    """Three numbers: samples of the first iterations, how many are added at a time, and after how many samples in all the
    iterations have --global-batch-size. The learning rate goes by samples, so small iterations advance it less."""

    def __post_init__(self) -> None:
        positive(self, "micro_batch_size", "global_batch_size")
        if self.rampup_batch_size and (len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1):
            raise ConfigError(
                f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))} must be three numbers above 0: "
                "first batch size, increment, and samples until the last one"
            )


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


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data_path: tuple[str, ...] = field(default=(), metadata={"metavar": "[WEIGHT] PREFIX"})
    """Indexed dataset(s), without .bin/.idx: one prefix, several, or pairs of weight and prefix."""
    split: str = "969, 30, 1"
    """Proportions of training, validation and test documents."""
    mock_data: bool = False
    """Synthetic data instead of --data-path."""
    data_cache_path: str | None = None
    """Where sample indices are cached. Default: beside the data; those of several datasets together are not."""
    tokenizer_type: Literal["ByteLevelTokenizer", "NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"] = (
        "ByteLevelTokenizer"
    )
    """Which tokenizer the data was made with. ByteLevelTokenizer needs no files: a token is a byte."""
    tokenizer_model: str | None = None
    """Path (or Hugging Face name) of the tokenizer, for the types that have one."""
    vocab_size: int | None = None
    """Vocabulary before padding. Default: the tokenizer's; NullTokenizer needs it."""
    num_workers: int = 0
    """Processes per rank that load data ahead; 0 loads in the rank itself."""
    reset_position_ids: bool = False
    """Restart positions after each end of document."""
    reset_attention_mask: bool = False
    """No attention across an end of document."""
    eod_mask_loss: bool = False
    """No loss on end-of-document tokens."""
    mmap_bin_files: bool = True
    """Read .bin files with file pointers instead of memory maps."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")
        positive(self, "vocab_size")
        weights = re.split(r"[,/]\s*", self.split.strip())
        are_numbers = len(weights) <= 3 and all(re.fullmatch(r"\d*\.?\d+", weight.strip()) for weight in weights)
        if not are_numbers:
            raise ConfigError(f"--split {self.split!r} must be up to three proportions, for example 969,30,1")
        if not any(self.split_weights):
            raise ConfigError(f"--split {self.split!r} gives no share to anything; one must be above 0, for example 969,30,1")
        if self.mock_data and self.data_path:
            raise ConfigError("--mock-data and --data-path are both given; choose one")
        if not self.mock_data and not self.data_path:
            raise ConfigError("no data: give --data-path PREFIX (see tools/preprocess_data.py), or --mock-data")
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        if self.tokenizer_type == "ByteLevelTokenizer" and (self.vocab_size or 256) < 256:
            raise ConfigError(f"--vocab-size {self.vocab_size} is too small for ByteLevelTokenizer, which has 256 bytes")
        needs_model = self.tokenizer_type in ("HuggingFaceTokenizer", "SentencePieceTokenizer")
        if needs_model and self.tokenizer_model is None:
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs --tokenizer-model")

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Shares of training, validation and test documents, in any unit."""
        train, valid, test, *_ = (*map(float, re.split(r"[,/]", self.split)), 0.0, 0.0, 0.0)
        return train, valid, test

    @property
    def blend(self) -> tuple[list[str], list[float] | None]:
        """Prefixes and, where they were given, weights."""
        words = list(self.data_path)
        if len(words) % 2 == 0 and all(re.fullmatch(r"\d*\.?\d+", word) for word in words[::2]):
            return words[1::2], [float(word) for word in words[::2]]
        return words, None


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
