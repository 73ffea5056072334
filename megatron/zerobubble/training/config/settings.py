"""All settings of one job, checked. The rest of the training stack reads the command line only through these."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import placement_of, schedule_info
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.training.config.checkpoints import CheckpointConfig
from megatron.zerobubble.training.config.data import DataConfig
from megatron.zerobubble.training.config.fp8 import Fp8Config
from megatron.zerobubble.training.config.mla import MlaConfig
from megatron.zerobubble.training.config.model import ModelConfig, PrecisionConfig
from megatron.zerobubble.training.config.moe import MoeConfig, layer_pattern
from megatron.zerobubble.training.config.optim import OptimConfig
from megatron.zerobubble.training.config.parallel import ParallelConfig
from megatron.zerobubble.training.config.run_control import RunConfig
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every group of flags, and what follows from them and the number of ranks.

    Made by `arguments.parse_arguments`, which also checks that the groups go together (`check.check_settings`).
    """

    model: ModelConfig
    """Model architecture."""
    mla: MlaConfig
    """Multi-latent attention."""
    moe: MoeConfig
    """Mixture of experts."""
    parallel: ParallelConfig
    """Tensor, pipeline, context and data parallelism."""
    zero_bubble: ZeroBubbleConfig
    """Pipeline schedule, planner and post-validation."""
    optim: OptimConfig
    """Optimizer and learning rate."""
    precision: PrecisionConfig
    """Precision and loss scaling."""
    fp8: Fp8Config
    """GEMMs in FP8."""
    data: DataConfig
    """Datasets and batch sizes."""
    tokenizer: TokenizerConfig
    """Tokenizer."""
    run: RunConfig
    """Length of the run, evaluation, early exit, seed, logs."""
    checkpoint: CheckpointConfig
    """Saving and loading checkpoints."""
    world_size: int
    """Number of ranks of the job."""
    ignored_flags: tuple[str, ...] = ()
    """Flags that were given and change no result."""
    notes: tuple[str, ...] = ()
    """Lines for the log: about flags of the authors' fork that were given, and the loop that runs."""

    @property
    def pipeline_size(self) -> int:
        """Pipeline ranks, p."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks per data-parallel replica of the model."""
        return self.parallel.model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas of the model, each of which reads samples of its own."""
        return self.world_size // self.model_parallel_size

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Tensor-parallel size of each expert."""
        return self.moe.expert_tensor_parallel_size or self.parallel.tensor_model_parallel_size

    @property
    def moe_layer_pattern(self) -> tuple[int, ...]:
        """Per transformer layer, 1 if it has experts, else 0. Raises ConfigError if --moe-layer-freq is malformed."""
        if self.moe.num_experts is None:
            return (0,) * self.model.num_layers
        return layer_pattern(self.moe.moe_layer_freq, self.model.num_layers)

    @property
    def global_batch_size(self) -> int:
        """Samples per iteration."""
        return self.data.global_batch_size or self.data.micro_batch_size * self.data_parallel_size

    @property
    def train_samples(self) -> int:
        """Samples of the run: --train-samples, or those of --train-iters."""
        return self.run.train_samples or (self.run.train_iters or 0) * self.global_batch_size

    @property
    def train_iters(self) -> int:
        """Iterations of the run: --train-iters, or the whole global batches in --train-samples."""
        return self.run.train_iters or self.train_samples // self.global_batch_size

    @property
    def lr_decay_samples(self) -> int:
        """Samples over which the learning rate decays."""
        in_iterations = (self.optim.lr_decay_iters or 0) * self.global_batch_size
        return in_iterations or self.optim.lr_decay_samples or self.train_samples

    @property
    def lr_warmup_samples(self) -> float:
        """Samples of learning rate warm-up."""
        if self.optim.lr_warmup_fraction is not None:
            return self.optim.lr_warmup_fraction * self.lr_decay_samples
        return self.optim.lr_warmup_iters * self.global_batch_size or self.optim.lr_warmup_samples

    def with_iterations(self, num_iterations: int) -> Settings:
        """These settings with a run of another length. The learning rate decays as over the whole run of these."""
        if self.run.train_samples is not None:
            run = replace(self.run, train_samples=num_iterations * self.global_batch_size)
            return replace(self, run=run, optim=replace(self.optim, lr_decay_samples=self.lr_decay_samples))
        decay_iters = self.optim.lr_decay_iters or self.run.train_iters
        return replace(
            self,
            run=replace(self.run, train_iters=num_iterations),
            optim=replace(self.optim, lr_decay_iters=decay_iters),
        )

    def padded_vocab_size(self, vocab_size: int) -> int:
        """`vocab_size`, padded to a multiple of --make-vocab-size-divisible-by times the tensor-parallel size."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration and data-parallel rank, m."""
        return self.global_batch_size // (self.data.micro_batch_size * self.data_parallel_size)

    @property
    def num_chunks(self) -> int:
        """Model chunks per rank, v: 2 with V placement, the virtual pipeline size when interleaved, else 1."""
        name = self.zero_bubble.schedule
        if name == AUTO and self.zero_bubble.zero_bubble_v_schedule:
            name = "zbv"
        info = None if name in ("stock", AUTO) else schedule_info(name)
        if info is not None and info.num_chunks is not None:
            return info.num_chunks
        if self.parallel.pipeline_model_parallel_layout is not None:
            return max(1, StageLayers.parse(self.parallel.pipeline_model_parallel_layout).num_stages // self.pipeline_size)
        if self.parallel.num_virtual_stages_per_pipeline_rank is not None:
            return self.parallel.num_virtual_stages_per_pipeline_rank
        if self.parallel.num_layers_per_virtual_pipeline_stage is not None:
            each_round = self.pipeline_size * self.parallel.num_layers_per_virtual_pipeline_stage
            return -(-self.model.num_layers // each_round)  # rounded up: padding fills the last round
        return 1 if info is None else info.default_num_chunks

    def without_layout(self) -> Settings:
        """These settings without --pipeline-model-parallel-layout: layers are spread evenly."""
        return replace(self, parallel=replace(self.parallel, pipeline_model_parallel_layout=None))

    @property
    def placement(self) -> Placement:
        """The placement of stages on pipeline ranks: V or interleaved."""
        return placement_of(self.zero_bubble.family(self.num_chunks), num_ranks=self.pipeline_size, num_chunks=self.num_chunks)

    def stage_layers(self, placement: Placement) -> StageLayers:
        """The layers of each stage of `placement`: as --pipeline-model-parallel-layout has them, padded if allowed, or spread
        evenly.

        Raises:
            ConfigError: the layers cannot be divided over the stages, or the layout does not fit the model or the placement.
        """
        if self.parallel.pipeline_model_parallel_layout is not None:
            return self._given_layers(StageLayers.parse(self.parallel.pipeline_model_parallel_layout), placement)
        return self._divided_layers(placement)

    def _divided_layers(self, placement: Placement) -> StageLayers:
        num_layers, pads = self.model.num_layers, self.parallel.allow_padding_num_layers
        remedy = "--pipeline-model-parallel-layout sets the layers of each stage"
        why = None
        try:
            padded = StageLayers.padded(num_layers, placement)
            if pads:
                return padded
            remedy += ", --allow-padding-num-layers gives the first and last stage one less"
        except ConfigError as error:
            why = error if pads else None
        try:
            return StageLayers.spread(num_layers, placement)
        except ConfigError as error:
            raise ConfigError(f"--num-layers {num_layers}: {why or error}. {remedy}") from None

    def _given_layers(self, layers: StageLayers, placement: Placement) -> StageLayers:
        given = f"--pipeline-model-parallel-layout {self.parallel.pipeline_model_parallel_layout}"
        if layers.num_layers != self.model.num_layers:
            raise ConfigError(f"{given} has {layers.num_layers} layers, --num-layers is {self.model.num_layers}")
        mtp, wanted_mtp = StageLayers.mtp_layers(str(self.parallel.pipeline_model_parallel_layout)), self.model.mtp_num_layers
        if mtp is not None and mtp[1] != wanted_mtp:
            raise ConfigError(f"{given} has {mtp[1]} MTP layers, --mtp-num-layers is {wanted_mtp}")
        if layers.num_stages != placement.num_stages:
            wanted = f"a multiple of {self.pipeline_size}" if self.zero_bubble.schedule == "stock" else f"{placement.num_stages}"
            raise ConfigError(
                f"{given} has {layers.num_stages} stages; schedule {self.zero_bubble.schedule} on {self.pipeline_size} pipeline "
                f"ranks needs {wanted}"
            )
        return layers

    @property
    def virtual_pipeline_size(self) -> int | None:
        """`num_chunks` in megatron-core's form: None instead of 1."""
        return self.num_chunks if self.num_chunks > 1 else None

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """The chosen schedule, for the planner and `PipelineSchedule`. Raises UserError."""
        return self.zero_bubble.schedule_spec(
            num_ranks=self.pipeline_size, num_chunks=self.num_chunks, memory_limit=self.plan_memory_limit
        )

    @property
    def plan_memory_limit(self) -> float | None:
        """Memory limit of plans before memory is measured, in units of 1F1B's activation memory on the first rank.

        None without --zero-bubble-memory-limit. For a limit in bytes it is one microbatch per rank, the least possible.
        """
        limit = self.zero_bubble.memory_limit
        if limit is None or limit.relative is not None:
            return None if limit is None else limit.relative
        return 1.0 / min(self.pipeline_size, self.num_microbatches)

    @property
    def watchdog_s(self) -> float | None:
        """Watchdog timeout in seconds; None if it is disabled."""
        given = self.zero_bubble.zero_bubble_watchdog_seconds
        if given == 0:
            return None
        return given or 60.0 * self.parallel.distributed_timeout_minutes / 2.0
