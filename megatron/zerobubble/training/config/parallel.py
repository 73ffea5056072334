"""Tensor, pipeline, context and data parallelism: the flags of the group "Parallelism"."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, positive
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["ParallelConfig"]

_CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""What megatron-core's configuration takes."""


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
    overlap_p2p_communication: bool = True
    """Interleaved 1F1B: do not overlap sends and receives with compute. By default they overlap."""
    sequence_parallel: bool = False
    """Sequence parallelism: shard normalization and dropout over the tensor-parallel ranks along the sequence."""
    context_parallel_size: int = 1
    """Context-parallel size: ranks over which each sequence is sharded. Each holds two of 2 * N equal slices, an early and a late
    one, so that all have the same work in causal attention."""
    cp_comm_type: tuple[str, ...] = ()
    """How context-parallel ranks exchange keys and values: p2p, all_gather, a2a or a2a+p2p; one, or one for each layer. With
    --transformer-impl local only all_gather, its default. Transformer Engine, whose default is p2p, has them all."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """Sizes of the two levels of --cp-comm-type a2a+p2p. Their product is --context-parallel-size."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = False
    """Overlap the data-parallel gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the parameter all-gather with the forward pass. Needs --use-distributed-optimizer and --overlap-grad-reduce."""
    ddp_bucket_size: int | None = None
    """Parameters per bucket of the data-parallel gradient reduction, with --overlap-grad-reduce or --zero-bubble-shard-gradients.
    Default: megatron-core's."""
    ddp_average_in_collective: bool = False
    """Average gradients in the data-parallel collective instead of scaling them before it. Not with gloo."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Process group backend: nccl on GPUs; gloo on CPUs, or if several ranks share a GPU, with transfers through host memory.
    Default: nccl if CUDA is available, else gloo."""
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
        positive(self, "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "ddp_bucket_size")
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
        self._check_context()
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("--sequence-parallel needs --tensor-model-parallel-size of at least 2, got 1")
        if self.eager_nccl_communicators and self.distributed_backend == "gloo":
            raise ConfigError("--eager-nccl-communicators needs NCCL, and --distributed-backend is gloo: leave one of them out")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")

    def _check_context(self) -> None:
        """Check --cp-comm-type and --hierarchical-context-parallel-sizes. Whether the model has them, `validate` checks."""
        given, levels = " ".join(self.cp_comm_type), self.hierarchical_context_parallel_sizes
        unknown = sorted(set(self.cp_comm_type) - set(_CP_COMM_TYPES))
        if unknown:
            raise ConfigError(f"--cp-comm-type {given}: {', '.join(unknown)} is not one of {', '.join(_CP_COMM_TYPES)}")
        if (given or levels) and self.context_parallel_size == 1:
            flag = "--cp-comm-type" if given else "--hierarchical-context-parallel-sizes"
            raise ConfigError(f"{flag} needs --context-parallel-size of at least 2, got 1")
        if bool(levels) != ("a2a+p2p" in self.cp_comm_type):
            raise ConfigError("--cp-comm-type a2a+p2p and --hierarchical-context-parallel-sizes need each other")
        if levels and math.prod(levels) != self.context_parallel_size:
            raise ConfigError(
                f"--hierarchical-context-parallel-sizes {' '.join(map(str, levels))} multiply to {math.prod(levels)}, "
                f"--context-parallel-size is {self.context_parallel_size}"
            )

    def _check_layout(self, text: str) -> None:
        others = {
            "--num-layers-per-virtual-pipeline-stage": self.num_layers_per_virtual_pipeline_stage,
            "--num-virtual-stages-per-pipeline-rank": self.num_virtual_stages_per_pipeline_rank,
            "--allow-padding-num-layers": self.allow_padding_num_layers or None,
        }
        for flag, value in others.items():
            if value is not None:
                raise ConfigError(f"--pipeline-model-parallel-layout sets the layers of every stage; leave out {flag}")
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
    def is_interleaved(self) -> bool:
        """Whether the stock interleaved schedule is requested."""
        return bool(self.num_layers_per_virtual_pipeline_stage or self.num_virtual_stages_per_pipeline_rank)
