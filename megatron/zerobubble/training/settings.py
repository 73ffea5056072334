"""All settings of one job, checked. The only thing the rest of the training stack sees of the command line."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.plan.registry import schedule_info
from megatron.zerobubble.training.config_model import ModelConfig, ParallelConfig, PrecisionConfig, ZeroBubbleConfig
from megatron.zerobubble.training.config_run import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    OptimConfig,
    RunConfig,
)

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every group of flags, and what follows from them and the number of ranks.

    Made by `arguments.parse_arguments`, which also checks that the groups go together (`checks.check_settings`).
    """

    model: ModelConfig
    """What is trained."""
    precision: PrecisionConfig
    """In which number format."""
    parallel: ParallelConfig
    """How it is spread over ranks."""
    zero_bubble: ZeroBubbleConfig
    """By which schedule."""
    batch: BatchConfig
    """How many samples at once."""
    optim: OptimConfig
    """How weights change."""
    data: DataConfig
    """On what."""
    run: RunConfig
    """For how long."""
    checkpoint: CheckpointConfig
    """What is kept."""
    logging: LoggingConfig
    """What is told."""
    world_size: int
    """Ranks of the job."""

    @property
    def pipeline_size(self) -> int:
        """Pipeline ranks, p."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.parallel.tensor_model_parallel_size * self.pipeline_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        return self.world_size // self.model_parallel_size

    @property
    def global_batch_size(self) -> int:
        """Samples per iteration."""
        return self.batch.global_batch_size or self.batch.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration and data-parallel rank, m."""
        return self.global_batch_size // (self.batch.micro_batch_size * self.data_parallel_size)

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens in a global batch."""
        return self.global_batch_size * self.model.seq_length

    @property
    def num_chunks(self) -> int:
        """Model chunks per rank, v: what the schedule wants (2 under V), the virtual pipeline size when interleaved, else 1."""
        if self.zero_bubble.schedule != "stock":
            return schedule_info(self.zero_bubble.schedule).default_num_chunks
        if self.parallel.num_virtual_stages_per_pipeline_rank is not None:
            return self.parallel.num_virtual_stages_per_pipeline_rank
        if self.parallel.num_layers_per_virtual_pipeline_stage is not None:
            per_rank = self.model.num_layers // self.pipeline_size
            return per_rank // self.parallel.num_layers_per_virtual_pipeline_stage
        return 1

    @property
    def virtual_pipeline_size(self) -> int | None:
        """`num_chunks` as megatron-core wants it: None for 1."""
        return self.num_chunks if self.num_chunks > 1 else None

    @property
    def max_pending_backward(self) -> int | None:
        """Microbatches a rank may hold between F and W; None where the schedule's name says it."""
        if self.zero_bubble.schedule != "zb":
            return None
        return self.zero_bubble.max_pending_microbatches(num_ranks=self.pipeline_size)

    @property
    def plan_memory_limit(self) -> float | None:
        """Memory limit of plans before anything was measured; 1.0 is 1F1B's. In bytes nothing is known: one microbatch a rank."""
        limit = self.zero_bubble.memory_limit
        if limit is None or limit.relative is not None:
            return None if limit is None else limit.relative
        first = self.batch.rampup_batch_size[0] if self.batch.rampup_batch_size else self.global_batch_size
        return 1.0 / min(self.pipeline_size, first // (self.batch.micro_batch_size * self.data_parallel_size))

    @property
    def lr_decay_iters(self) -> int:
        """Iterations until the learning rate has decayed."""
        return self.optim.lr_decay_iters or self.run.train_iters

    @property
    def lr_warmup_iters(self) -> float:
        """Iterations of warm-up."""
        if self.optim.lr_warmup_fraction is not None:
            return self.optim.lr_warmup_fraction * self.lr_decay_iters
        return self.optim.lr_warmup_iters
