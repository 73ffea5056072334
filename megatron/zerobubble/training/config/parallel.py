"""Tensor, pipeline, context and data parallelism: the flags of the group "Parallelism"."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, positive, refuse
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism.

    The data-parallel size follows from the others: world size / (tensor-parallel size * pipeline-parallel size *
    context-parallel size).
    """

    tensor_model_parallel_size: int = 1
    """Tensor-parallel size: ranks over which each layer is sharded."""
    pipeline_model_parallel_size: int = 1
    """Pipeline-parallel size: ranks over which the layers are divided into stages."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleaved 1F1B: layers per virtual pipeline stage (model chunk). Default: one stage per rank, not interleaved."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Interleaved schedules: virtual pipeline stages (model chunks) per rank; an alternative to
    --num-layers-per-virtual-pipeline-stage. Default: 2 with an interleaved schedule of --zero-bubble-schedule, else 1."""
    pipeline_model_parallel_layout: str | None = field(default=None, metadata={"metavar": "LAYOUT"})
    """Contents of every stage, in the order data flows: E is the embedding, t a transformer layer, L the loss, and | separates
    stages; m, an MTP layer, may stand before the L; (tt|)*3 and t*3 repeat. A stock schedule with more stages than ranks is
    interleaved. Default: the same number of layers on every stage."""
    allow_padding_num_layers: bool = False
    """If --num-layers is not divisible by the number of stages, give the last stage, or the first and the last, one layer fewer,
    which compensates for the head and the embedding."""
    sequence_parallel: bool = False
    """Sequence parallelism: shard normalization and dropout over the tensor-parallel ranks along the sequence. No effect with
    --tensor-model-parallel-size 1."""
    context_parallel_size: int = 1
    """Context-parallel size: ranks over which each sequence is sharded. Each holds two of 2 * N equal slices, an early and a late
    one, so that all have the same work in causal attention. Keys and values are all-gathered with --transformer-impl local, and
    go around in a ring with Transformer Engine's layers."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = False
    """Overlap the data-parallel gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the parameter all-gather with the forward pass. Needs --use-distributed-optimizer and --overlap-grad-reduce."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Process group backend: nccl on GPUs, gloo on CPUs. Default: nccl if CUDA is available, else gloo."""
    eager_nccl_communicators: bool = False
    """Bind each process group to this rank's GPU and open its NCCL communicator when the group is made, instead of at its first
    use: errors show early, and start-up takes longer the more ranks there are."""
    distributed_timeout_minutes: int = 10
    """Timeout of the process groups, in minutes: how long a rank waits for the others before it fails."""

    def __post_init__(self) -> None:
        positive(self, "tensor_model_parallel_size", "pipeline_model_parallel_size", "distributed_timeout_minutes")
        positive(self, "context_parallel_size")
        at_most(self, 10_000, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        at_most(self, 10_000, "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
        at_most(self, 60 * 24 * 365, "distributed_timeout_minutes")
        positive(self, "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
        virtual = (self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank)
        if None not in virtual:
            raise ConfigError(
                "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank are both given; "
                "they mean the same, choose one"
            )
        if self.pipeline_model_parallel_layout is not None:
            self._check_layout(self.pipeline_model_parallel_layout)
        if virtual != (None, None) and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                "--num-layers-per-virtual-pipeline-stage interleaves pipeline ranks and needs "
                "--pipeline-model-parallel-size of at least 2, got 1"
            )
        if self.eager_nccl_communicators and self.distributed_backend == "gloo":
            raise ConfigError("--eager-nccl-communicators needs NCCL, and --distributed-backend is gloo: leave one of them out")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")

    def without_idle_sequence_parallel(self) -> ParallelConfig:
        """Without --sequence-parallel if there is no tensor parallelism, as in Megatron-LM."""
        return self if self.tensor_model_parallel_size > 1 else replace(self, sequence_parallel=False)

    def check(self, *, world_size: int) -> None:
        """Raise ConfigError unless the sizes divide the number of ranks."""
        context, size = self.context_parallel_size, self.model_parallel_size
        if world_size % size:
            raise ConfigError(
                f"the job has {world_size} rank(s), which is not divisible by --tensor-model-parallel-size "
                f"{self.tensor_model_parallel_size} x --pipeline-model-parallel-size {self.pipeline_model_parallel_size}"
                + (f" x --context-parallel-size {context}" if context > 1 else "")
                + f" = {size}; start it with torchrun --nproc-per-node {size}, or a multiple of it"
            )

    def _check_layout(self, text: str) -> None:
        others = {
            "--num-layers-per-virtual-pipeline-stage": self.num_layers_per_virtual_pipeline_stage,
            "--num-virtual-stages-per-pipeline-rank": self.num_virtual_stages_per_pipeline_rank,
            "--allow-padding-num-layers": self.allow_padding_num_layers,
        }
        refuse("--pipeline-model-parallel-layout sets the layers of every stage; leave out", others)
        if self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                "--pipeline-model-parallel-layout divides the layers over pipeline ranks and needs "
                "--pipeline-model-parallel-size of at least 2, got 1"
            )
        try:
            stages, mtp = StageLayers.parse(text).num_stages, StageLayers.mtp_layers(text)
        except ConfigError as error:
            raise ConfigError(f"--pipeline-model-parallel-layout: {error}") from None
        if mtp is not None and mtp[0] != stages - 1:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {text} has MTP layers (m) in stage {mtp[0]}: put them directly before the L; "
                "in other stages they train with Megatron-LM's script under zerobubble run"
            )

    @property
    def model_parallel_size(self) -> int:
        """Ranks per data-parallel replica of the model: tensor-parallel size * pipeline size * context-parallel size."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def is_interleaved(self) -> bool:
        """Whether the stock interleaved schedule is requested."""
        return bool(self.num_layers_per_virtual_pipeline_stage or self.num_virtual_stages_per_pipeline_rank)
