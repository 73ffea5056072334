"""A dense GPT's layers with assumed times and bytes, from Megatron-LM's flags: what a profiled run's `layers.json` has measured.

Counted per token on one tensor-parallel rank:

  linear layer      2 FLOPs per weight in each of F, B and W; stores its input until B, input and output's gradient until W
  attention         causal, as flash attention: 2 FLOPs per position and query channel in F, 2.5 times that in B; stores queries,
                    keys and values, and its output, which is the next layer's input
  norm, activation  no time; store their inputs
  embedding         F and W move 3 and 2 rows of the hidden size
  head              a linear layer behind a norm; stores its logits twice, in fp32 for the loss
  message           a row of the hidden size

Biases, weights of norms, position embeddings and tensor-parallel communication are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.partition.layer_costs import EMBEDDING, HEAD, LayerCosts, Model

__all__ = ["ASSUMED", "NOT_ESTIMATED", "Device", "ModelFlags"]

ASSUMED = (
    "H100 (SXM): 989 TFLOP/s, of which linear layers reach 50 % and attention 40 %, 3.35 TB/s of memory, 50 GB/s between ranks"
)
"""The device, in words."""
_ATTENTION = 0.8
"""Share of linear layers' speed that attention reaches."""

NOT_ESTIMATED = (
    "--num-experts",
    "--multi-latent-attention",
    "--mtp-num-layers",
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
    "--is-hybrid-model",
    "--heterogeneous-layers-config-path",
)
"""Flags of models with other layers."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device and its links reach; by default `ASSUMED`."""

    peak_tflops: float = 989.0
    """Peak of dense GEMMs in TFLOP/s."""
    efficiency: float = 0.5
    """Share of the peak that linear layers reach."""
    memory_tb_per_s: float = 3.35
    """Memory bandwidth in TB/s."""
    link_gb_per_s: float = 50.0
    """Bandwidth between pipeline ranks in GB/s."""

    @property
    def flops_per_ms(self) -> float:
        """FLOPs of linear layers per millisecond."""
        return self.peak_tflops * 1e9 * self.efficiency


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Model and batch, by Megatron-LM's names.

    Raises ConfigError for a size below 1, and for one that does not divide over tensor-parallel ranks.
    """

    num_layers: int
    """Number of transformer layers."""
    hidden_size: int
    """Hidden size."""
    num_attention_heads: int
    """Number of attention heads."""
    seq_length: int
    """Tokens per sample."""
    micro_batch_size: int
    """Samples per microbatch."""
    vocab_size: int
    """Size of the vocabulary."""
    ffn_hidden_size: int | None = None
    """Intermediate width of the MLP. Default: Megatron-LM's."""
    kv_channels: int | None = None
    """Width of an attention head. Default: the hidden size over the heads."""
    group_query_attention: bool = False
    """Grouped-query attention."""
    num_query_groups: int = 1
    """Number of key/value groups with grouped-query attention."""
    swiglu: bool = False
    """Gated MLP."""
    make_vocab_size_divisible_by: int = 128
    """Pads the vocabulary to a multiple of this times the tensor-parallel ranks."""
    tensor_model_parallel_size: int = 1
    """Tensor-parallel ranks."""
    sequence_parallel: bool = False
    """Shard activations between linear layers over the tensor-parallel ranks, too."""
    context_parallel_size: int = 1
    """Ranks that share a sequence."""
    pipeline_model_parallel_size: int | None = None
    """Pipeline ranks."""
    global_batch_size: int | None = None
    """Samples per iteration."""
    bf16: bool = False
    """Train in bfloat16."""
    fp16: bool = False
    """Train in float16."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """With full, a layer stores its input alone, and B runs F again."""

    def __post_init__(self) -> None:
        sizes = {name: size for name, size in vars(self).items() if isinstance(size, int) and not isinstance(size, bool)}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {size}; give 1 or more")
        for name in ("num_attention_heads", "ffn_hidden_size"):
            if sizes.get(name, 0) % self.tensor_model_parallel_size:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {sizes[name]} is not divisible by --tensor-model-parallel-size "
                    f"{self.tensor_model_parallel_size}"
                )

    def num_microbatches(self, data_parallel_size: int) -> int | None:
        """Microbatches per iteration of one of this many pipelines; None without a global batch."""
        batch, each = self.global_batch_size, self.micro_batch_size * data_parallel_size
        if batch is not None and batch % each:
            raise ConfigError(
                f"--global-batch-size {batch} does not divide over --micro-batch-size {self.micro_batch_size} x "
                f"--data-parallel-size {data_parallel_size}"
            )
        return None if batch is None else batch // each

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of a parameter and its gradient, in fp32, and of its optimizer state."""
        is_half = self.bf16 or self.fp16
        return (2 if is_half else 4) + 4, 12 if is_half else 8

    def model(self, data_parallel_size: int, device: Device | None = None) -> Model:
        """The layers with their estimated costs; the state of a distributed optimizer is divided over this many replicas."""
        device = device or Device()
        hidden, tensor = self.hidden_size, self.tensor_model_parallel_size
        queries = self.num_attention_heads * (self.kv_channels or hidden // self.num_attention_heads)
        groups = self.num_query_groups if self.group_query_attention else self.num_attention_heads
        ffn = self.ffn_hidden_size or (int(8 * hidden / 3) // 64 * 64 if self.swiglu else 4 * hidden)
        qkv, up = queries + 2 * groups * queries // self.num_attention_heads, ffn * (2 if self.swiglu else 1)
        multiple = self.make_vocab_size_divisible_by * tensor
        vocabulary = -(-self.vocab_size // multiple) * multiple / tensor
        tokens = self.micro_batch_size * self.seq_length / self.context_parallel_size
        between = hidden / (tensor if self.sequence_parallel else 1)  # channels of a token between the linear layers
        value_bytes = 2 if self.bf16 or self.fp16 else 4

        kept, state = self.weight_bytes
        weight_bytes = kept + state / (data_parallel_size if self.use_distributed_optimizer else 1)
        weights = hidden * (qkv + queries + up + ffn) / tensor
        linear_ms = 2 * weights * tokens / device.flops_per_ms
        attention_ms = 2 * self.seq_length * queries / tensor * tokens / (_ATTENTION * device.flops_per_ms)
        forward_ms, is_recomputed = linear_ms + attention_ms, self.recompute_granularity == "full"
        stored = 4 * between + (qkv + queries + up + ffn) / tensor  # until B, and as much until W
        layer = LayerCosts(
            forward_ms=forward_ms,
            backward_ms=linear_ms + 2.5 * attention_ms + (forward_ms if is_recomputed else 0.0),
            wgrad_ms=linear_ms,
            activation_bytes=value_bytes * tokens * (between if is_recomputed else stored),
            after_backward_bytes=value_bytes * tokens * stored,
            static_bytes=weight_bytes * weights,
        )
        row_ms = value_bytes * hidden * tokens / (device.memory_tb_per_s * 1e9)
        embedding = LayerCosts(forward_ms=3 * row_ms, wgrad_ms=2 * row_ms, static_bytes=weight_bytes * vocabulary * hidden)
        head_ms = 2 * vocabulary * hidden * tokens / device.flops_per_ms
        head = LayerCosts(
            forward_ms=head_ms,
            backward_ms=head_ms,
            wgrad_ms=head_ms,
            activation_bytes=tokens * (value_bytes * (2 * between + vocabulary) + 4 * vocabulary),
            after_backward_bytes=value_bytes * tokens * (between + vocabulary),
            static_bytes=embedding.static_bytes,
        )
        return Model(
            layers=("layer",) * self.num_layers,
            kinds={EMBEDDING: embedding, "layer": layer, HEAD: head},
            comm_ms=value_bytes * between * tokens / (device.link_gb_per_s * 1e6),
        )
