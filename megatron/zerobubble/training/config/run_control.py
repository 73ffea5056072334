"""Length of the run, evaluation, early exit, seed and logs: the flags of the group "Run control"."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, not_negative, positive
from megatron.zerobubble.training.config.model import ModelConfig
from megatron.zerobubble.training.config.parallel import ParallelConfig

__all__ = ["RunConfig"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run control."""

    train_iters: int | None = None
    """Number of iterations to train. Either this or --train-samples is required."""
    train_samples: int | None = None
    """Number of samples to train on, in whole global batches. An alternative to --train-iters."""
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
    seed: int = 1234
    """Seed of weight initialization, data order and dropout."""
    init_by_rank: bool = False
    """Draw initial weights in Megatron-LM's way: another schedule, pipeline size or tensor-parallel size then begins with other
    weights. By default each is drawn by --seed and its name, so that all layouts begin with the same ones."""
    layout_independent_dropout: bool = False
    """Draw dropout masks by --seed, layer and sample, so that every schedule, pipeline size and data-parallel size has the same
    ones. By default each rank draws them in the order of its passes. Needs --attention-dropout 0 with tensor parallelism, and no
    dropout with sequence or context parallelism."""
    check_for_nan_in_loss_and_grad: bool = True
    """Continue training after a loss or gradient norm that is not finite. By default the run stops."""
    log_interval: int = 100
    """Iterations between progress lines in the log."""
    metrics_jsonl: str | None = field(default=None, metadata={"metavar": "FILE"})
    """File to write one JSON object per iteration to, with its loss, learning rate and time. Objects are written at every
    progress line. A continued run appends."""

    def __post_init__(self) -> None:
        positive(self, "train_iters", "train_samples", "eval_interval", "exit_interval", "exit_duration_in_mins")
        positive(self, "seed", "log_interval")
        not_negative(self, "eval_iters")
        at_most(self, 4_000_000_000, "seed")  # numpy's generators take 32 bits, and every pipeline rank adds to it
        at_most(self, 2**31 - 1, "train_iters", "eval_iters", "eval_interval", "exit_interval")
        at_most(self, 2**53, "train_samples")
        if self.train_iters is None and self.train_samples is None:
            raise ConfigError("the length of the run is missing: give --train-iters or --train-samples")
        if self.train_iters is not None and self.train_samples is not None:
            raise ConfigError("--train-iters and --train-samples are both given; choose one")

    def check(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        """Raise ConfigError if --layout-independent-dropout cannot make masks so: each rank would draw its own."""
        if not self.layout_independent_dropout:
            return
        if model.attention_dropout > 0 and parallel.tensor_model_parallel_size > 1:
            raise ConfigError(
                "--layout-independent-dropout with tensor parallelism needs --attention-dropout 0: each rank has other heads, "
                "and draws masks of its own for them"
            )
        if model.hidden_dropout > 0 and (parallel.sequence_parallel or parallel.context_parallel_size > 1):
            context = f"--context-parallel-size {parallel.context_parallel_size}"
            raise ConfigError(
                f"--layout-independent-dropout with {'--sequence-parallel' if parallel.sequence_parallel else context} needs "
                "--hidden-dropout 0 and --attention-dropout 0: each rank has other tokens, and draws masks of its own for them"
            )
