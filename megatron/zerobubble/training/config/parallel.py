"""How the model is spread over ranks: one group of flags, in the manner of `config_model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.training.config.require import positive

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism.

    Data parallelism takes what tensor and pipeline parallelism leave: world size / (tensor * pipeline).
    """

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the stack of layers."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleaved 1F1B: layers of one model chunk."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Interleaved 1F1B: model chunks per rank; the other way to say --num-layers-per-virtual-pipeline-stage."""
    pipeline_model_parallel_layout: str | None = field(default=None, metadata={"metavar": "LAYOUT"})
    """Which stage holds what, stages in the order data flows: E the embedding, t a layer, L the loss, | between stages; (tt|)*3
    and t*3 repeat. A stock schedule with more stages than ranks is interleaved. Default: every stage the same."""
    allow_padding_num_layers: bool = False
    """Where --num-layers does not divide by the number of stages: let the last stage, or the first and the last, hold a layer
    less, to make up for the head and the embedding."""
    overlap_p2p_communication: bool = True
    """Interleaved 1F1B: do not overlap sends and receives with compute."""
    sequence_parallel: bool = False
    """Split norms and dropout over the tensor-parallel ranks along the sequence."""
    context_parallel_size: int = 1
    """Ranks that share each sequence. Only 1: the layers that run here attend to whole sequences."""
    use_distributed_optimizer: bool = False
    """Split the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather parameters while the forward pass already runs; needs --use-distributed-optimizer."""
    ddp_bucket_size: int | None = None
    """Parameters per bucket of the overlapped gradient reduction, or of --zero-bubble-shard-gradients."""
    ddp_average_in_collective: bool = False
    """Let the gradient reduction average over the data-parallel ranks, instead of scaling before it. Not with gloo."""
    num_distributed_optimizer_instances: int = 1
    """Copies of the distributed optimizer's shards. Only 1: several are summed on a stream of their own, which was never tried
    with our schedules."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Process group backend: nccl on GPUs; gloo on CPUs, or where ranks share a GPU, with transfers through host memory. Default:
    nccl where CUDA is available, else gloo."""
    distributed_timeout_minutes: int = 10
    """How long a rank waits for the others before it gives up."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size", "pipeline_model_parallel_size", "distributed_timeout_minutes")
        positive(self, "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "ddp_bucket_size")
        if self.num_distributed_optimizer_instances != 1:
            raise ConfigError(
                f"--num-distributed-optimizer-instances {self.num_distributed_optimizer_instances} is not supported, only 1 is; "
                "leave it out to shard over all data-parallel ranks"
            )
        virtual = (self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank)
        if None not in virtual:
            raise ConfigError(
                "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank are both given; "
                "they say the same thing, choose one"
            )
        if self.pipeline_model_parallel_layout is not None:
            self._check_layout(self.pipeline_model_parallel_layout)
        if virtual != (None, None) and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                "--num-layers-per-virtual-pipeline-stage interleaves pipeline ranks and needs "
                "--pipeline-model-parallel-size of at least 2, got 1"
            )
        if self.context_parallel_size != 1:
            raise ConfigError(
                f"--context-parallel-size {self.context_parallel_size} is not supported: megatron-core's local attention takes "
                "whole sequences, and Transformer Engine's has not been run with this package; leave it out, and for long "
                "sequences give --sequence-parallel and --recompute-granularity"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("--sequence-parallel needs --tensor-model-parallel-size of at least 2, got 1")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")

    def _check_layout(self, text: str) -> None:
        others = {
            "--num-layers-per-virtual-pipeline-stage": self.num_layers_per_virtual_pipeline_stage,
            "--num-virtual-stages-per-pipeline-rank": self.num_virtual_stages_per_pipeline_rank,
            "--allow-padding-num-layers": self.allow_padding_num_layers or None,
        }
        for flag, value in others.items():
            if value is not None:
                raise ConfigError(f"--pipeline-model-parallel-layout says what every stage holds; leave out {flag}")
        if self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                "--pipeline-model-parallel-layout divides the layers over pipeline ranks and needs "
                "--pipeline-model-parallel-size of at least 2, got 1"
            )
        try:
            StageLayers.parse(text)
        except ConfigError as error:
            raise ConfigError(f"--pipeline-model-parallel-layout: {error}") from None

    @property
    def is_interleaved(self) -> bool:
        """Whether the stock interleaved schedule is asked for."""
        return bool(self.num_layers_per_virtual_pipeline_stage or self.num_virtual_stages_per_pipeline_rank)
