"""Times and bytes of a transformer's layers from its sizes and a GPU's published peak, before anything was profiled.

FLOPs over a share of the peak, per token: a linear layer takes 2 per weight in each of F, B and W; the attention core
``s * heads * (query size + value size)`` in F (causal, so half of all pairs), 2.5 times that in B, none in W. With ``efficiency``
of the peak in linear layers the attention core gets 0.8 of that, and experts' GEMMs 0.7. The embedding moves 3 rows of the hidden
size in F and 2 in W. A message is 2 bytes per token and hidden value.

Activations in bf16: every linear layer keeps its input, the attention core its inputs and output, an activation function its
inputs, a norm its input; logits 2 + 4 bytes (fp32 for the loss). Between B and W a linear layer keeps its input and its output's
gradient. With full recomputation a layer keeps its input, and B runs F again. Weights take 2 bytes, gradients 4 (fp32), the
optimizer state 12, divided over the data-parallel replicas. Tensor parallelism, with sequence parallelism, divides all of it;
its all-reduces and the all-to-alls of experts are not counted, as if they were hidden behind GEMMs.

`docs/benchmarks/data/layers` has the same estimates of published models.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.plan.partition.layer_costs import EMBEDDING, HEAD, LayerCosts, Model

LAYER = "layer"
_BACKWARD_OF_ATTENTION = 2.5
_ATTENTION, _EXPERTS = 0.8, 0.7
"""Efficiency of the attention core and of experts' GEMMs, relative to that of linear layers."""
_WEIGHT, _GRADIENT, _STATE = 2, 4, 12
"""Bytes per parameter."""
_VALUE, _LOSS = 2, 4
"""Bytes of an activation, and of a logit beside it in the loss."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a GPT, of its parallel layout, and of the GPU that it runs on."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """KV heads; 0: as many as attention heads."""
    kv_channels: int
    """Size of a head; 0: the hidden size over the heads."""
    ffn_hidden_size: int
    is_gated: bool
    """Whether the MLP has a gate (SwiGLU): three weights of its size in place of two."""
    vocab_size: int
    seq_length: int
    micro_batch_size: int
    recomputes: bool
    """Full recomputation of every layer in B."""
    num_experts: int
    """0: a dense MLP."""
    moe_router_topk: int
    moe_ffn_hidden_size: int
    expert_parallel_size: int
    tensor_parallel_size: int
    data_parallel_size: int
    """Replicas over which a distributed optimizer divides its state."""
    peak_tflops: float
    """Of the GPU, dense bf16."""
    memory_tb_per_s: float
    """Bandwidth of the GPU's memory."""
    link_gb_per_s: float
    """Bandwidth between pipeline ranks."""
    efficiency: float
    """Share of the peak that linear layers reach."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.seq_length * self.micro_batch_size

    def ms(self, flops_per_token: float, efficiency: float = 1.0) -> float:
        """The time of so many FLOPs for every token, at a share of the efficiency of linear layers."""
        peak = self.peak_tflops * 1e9 * self.efficiency * efficiency * self.tensor_parallel_size
        return flops_per_token * self.tokens / peak

    def activation_bytes(self, values_per_token: float) -> float:
        """Bytes of so many activations for every token."""
        return _VALUE * values_per_token * self.tokens / self.tensor_parallel_size

    def static_bytes(self, num_weights: float, shards: int = 1) -> float:
        """Weights, gradients and optimizer state."""
        return num_weights * (_WEIGHT + _GRADIENT + _STATE / self.data_parallel_size) / shards / self.tensor_parallel_size


def estimate(shape: Shape) -> Model:
    """The model's layers with estimated times and bytes."""
    kinds = {EMBEDDING: _embedding(shape), LAYER: _layer(shape), HEAD: _head(shape)}
    message_ms = _VALUE * shape.hidden_size * shape.tokens / shape.tensor_parallel_size / (shape.link_gb_per_s * 1e6)
    return Model(layers=(LAYER,) * shape.num_layers, kinds=kinds, comm_ms=message_ms)


def _layer(shape: Shape) -> LayerCosts:
    h, heads = shape.hidden_size, shape.num_attention_heads
    size = shape.kv_channels or h // heads
    query, pair = heads * size, 2 * (shape.num_query_groups or heads) * size
    gates = 2 if shape.is_gated else 1
    width = shape.moe_ffn_hidden_size * shape.moe_router_topk if shape.num_experts else shape.ffn_hidden_size
    attention, mlp = h * (query + pair) + query * h, (gates + 1) * h * width
    core = shape.ms(2 * shape.seq_length * query, _ATTENTION)
    gemms = shape.ms(2 * attention) + shape.ms(2 * mlp, _EXPERTS if shape.num_experts else 1.0)
    forward = gemms + core
    inputs, outputs = 2 * h + query + width, query + pair + h + gates * width + h
    if shape.num_experts:  # every token has a copy per expert in its GEMMs
        inputs, outputs = inputs + (shape.moe_router_topk - 1) * h, outputs + (shape.moe_router_topk - 1) * h
    whole = 2 * h + inputs + query + pair + gates * width
    experts = (gates + 1) * h * shape.moe_ffn_hidden_size * shape.num_experts
    static = shape.static_bytes(attention + (h * shape.num_experts if shape.num_experts else mlp))
    return LayerCosts(
        forward_ms=forward,
        backward_ms=gemms + _BACKWARD_OF_ATTENTION * core + (forward if shape.recomputes else 0.0),
        wgrad_ms=gemms,
        activation_bytes=shape.activation_bytes(h if shape.recomputes else whole),
        after_backward_bytes=shape.activation_bytes(inputs + outputs),
        static_bytes=static + shape.static_bytes(experts, shape.expert_parallel_size),
    )


def _embedding(shape: Shape) -> LayerCosts:
    row_ms = _VALUE * shape.hidden_size * shape.tokens / (shape.memory_tb_per_s * 1e9) / shape.tensor_parallel_size
    return LayerCosts(
        forward_ms=3 * row_ms, wgrad_ms=2 * row_ms, static_bytes=shape.static_bytes(shape.vocab_size * shape.hidden_size)
    )


def _head(shape: Shape) -> LayerCosts:
    ms = shape.ms(2 * shape.vocab_size * shape.hidden_size)
    logits = shape.vocab_size * (_VALUE + _LOSS) / _VALUE
    return LayerCosts(
        forward_ms=ms,
        backward_ms=ms,
        wgrad_ms=ms,
        activation_bytes=shape.activation_bytes(logits + 2 * shape.hidden_size),
        after_backward_bytes=shape.activation_bytes(shape.vocab_size + shape.hidden_size),
        static_bytes=shape.static_bytes(shape.vocab_size * shape.hidden_size),
    )
