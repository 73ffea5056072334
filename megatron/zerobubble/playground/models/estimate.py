"""A model from the sizes that the page asks for: `ModelFlags`, and experts in place of the MLP.

Experts' GEMMs reach 0.7 of the speed of linear layers. Every token has a copy per expert in them, whose input and output gradient
are stored. Weights, gradients and optimizer state of experts are divided over the expert-parallel ranks. All-to-alls are not
counted, as if they were hidden behind GEMMs; experts are assumed to have equal numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.model_estimate import Device, ModelFlags

_EXPERTS = 0.7
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "vocab_size")
_DEVICE = tuple(field.name for field in fields(Device))


def estimate(sizes: Mapping[str, float]) -> Model:
    """The layers with estimated times and bytes.

    Args:
        sizes: of all `model_problem.FIELDS`.

    Raises:
        ConfigError: a size does not divide over the tensor-parallel ranks.
    """
    whole = {name: int(value) for name, value in sizes.items()}
    tensor, replicas, experts = (whole[name] for name in ("tensor_model_parallel_size", "data_parallel_size", "num_experts"))
    flags = ModelFlags(
        **{name: whole[name] for name in _SIZES},  # type: ignore[arg-type]
        ffn_hidden_size=whole["moe_ffn_hidden_size"] * whole["moe_router_topk"] if experts else whole["ffn_hidden_size"],
        kv_channels=whole["kv_channels"] or None,
        group_query_attention=bool(whole["num_query_groups"]),
        num_query_groups=whole["num_query_groups"] or 1,
        swiglu=bool(whole["swiglu"]),
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        bf16=True,
        use_distributed_optimizer=True,
        recompute_granularity="full" if whole["recompute"] else None,
    )
    device = Device(**{name: sizes[name] for name in _DEVICE})
    model = flags.model(replicas, device)
    if not experts:
        return model
    tokens, layer = flags.seq_length * flags.micro_batch_size / tensor, model.kinds["layer"]
    matrices = 3 if flags.swiglu else 2
    active = matrices * flags.hidden_size * whole["moe_ffn_hidden_size"] * whole["moe_router_topk"]
    slower_ms = (1 / _EXPERTS - 1) * 2 * active * tokens / device.flops_per_ms
    copies = 2 * tokens * flags.hidden_size * (whole["moe_router_topk"] - 1)
    kept, state = flags.weight_bytes
    others = experts / whole["expert_model_parallel_size"] / whole["moe_router_topk"] - 1  # times the active ones
    more = LayerCosts(
        forward_ms=slower_ms,
        backward_ms=slower_ms * (2 if whole["recompute"] else 1),
        wgrad_ms=slower_ms,
        activation_bytes=0 if whole["recompute"] else copies,
        after_backward_bytes=2 * copies,
    )
    static = layer.static_bytes + (kept + state / replicas) * active * others / tensor
    return replace(model, kinds={**model.kinds, "layer": replace(LayerCosts.total([layer, more]), static_bytes=static)})
