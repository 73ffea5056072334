"""Memory that a run is going to need per rank, predicted from its flags before anything runs.

Weights, gradients and optimizer state follow from the number of weights of the rank's stages and the precision. Activations are
those that a transformer layer keeps from its forward pass until its backward pass (arXiv 2205.05198, sections 4.1 and 4.2, with
the widths of the flags in place of multiples of h), times the microbatches in flight at the peak of the plan. Left out: temporary
tensors of a pass, communication buffers, the CUDA context, fragmentation. --zero-bubble-memory-limit measures instead.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.plan.simulate import Simulation
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.estimate.layer_sizes import (
    ATTENTION,
    EXPERTS,
    attention_widths,
    kinds_per_layer,
    layer_weights,
    routed_weights,
)

__all__ = ["RankEstimate", "estimate_memory", "layer_activation_bytes", "stage_weights"]


@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """Predicted memory of one pipeline rank (of each of its tensor-parallel ranks), in bytes."""

    weights: int
    """Number of weights, not bytes."""
    state_bytes: float
    """Weights, gradients and optimizer state."""
    activation_bytes: float
    """Peak of activations kept for the backward passes."""

    @property
    def total_bytes(self) -> float:
        """State and activations."""
        return self.state_bytes + self.activation_bytes


def estimate_memory(settings: Settings, simulation: Simulation, *, vocab_size: int) -> tuple[RankEstimate, ...]:
    """The memory of every pipeline rank.

    Args:
        settings: the run.
        simulation: its plan, with costs whose unit of activation memory is one microbatch on one rank of even layers.
        vocab_size: the tokenizer's vocabulary size, before padding.
    """
    placement = simulation.plan.placement
    weights = stage_weights(settings, vocab_size=vocab_size)
    layers = [kind for kinds in kinds_per_layer(settings) for kind in kinds]
    of_all_layers = sum(layer_activation_bytes(settings, kind) for kind in layers)
    in_flight = min(settings.pipeline_size, settings.num_microbatches)  # 1F1B's on its first rank: the unit of peak_memory
    per_unit = of_all_layers / settings.pipeline_size * in_flight
    logits = settings.batch.micro_batch_size * settings.model.seq_length * settings.padded_vocab_size(vocab_size)
    of_head = (4.0 + _dtype_bytes(settings)) * logits / settings.model_parallel_size * settings.pipeline_size
    estimates = []
    for rank, peak in enumerate(simulation.peak_memory):
        stages = placement.rank_to_stages[rank]
        own = sum(weights[stage] for stage in stages)
        head = of_head * (1 + (settings.model.mtp_num_layers or 0)) if placement.num_stages - 1 in stages else 0.0
        estimates.append(
            RankEstimate(weights=own, state_bytes=own * state_bytes_per_weight(settings), activation_bytes=peak * per_unit + head)
        )
    return tuple(estimates)


def stage_weights(settings: Settings, *, vocab_size: int) -> tuple[int, ...]:
    """Weights of every stage on one tensor-parallel rank: its layers, and the embedding and head of the first and last stage.

    Args:
        settings: the model and its stages.
        vocab_size: the tokenizer's vocabulary size, before padding.
    """
    model, placement = settings.model, settings.placement
    tensor = settings.parallel.tensor_model_parallel_size
    kinds, counts, done = kinds_per_layer(settings), settings.stage_layers(placement).per_stage, 0
    found = []
    for count in counts:
        found.append(sum(_own_weights(settings, kind) for layer in kinds[done : done + count] for kind in layer))
        done += count
    words = settings.padded_vocab_size(vocab_size) * model.hidden_size // tensor
    has_positions = model.position_embedding_type == "learned_absolute"
    found[0] += words + (model.hidden_size * (model.max_position_embeddings or model.seq_length) if has_positions else 0)
    for _ in range(model.mtp_num_layers or 0):
        found[-1] += sum(_own_weights(settings, kind) for kind in kinds[-1]) + 2 * model.hidden_size**2 // tensor
    is_on_first_rank = placement.stage_to_rank[0] == placement.stage_to_rank[-1]
    if model.untie_embeddings_and_output_weights or not is_on_first_rank:
        found[-1] += words
    return tuple(found)


def _own_weights(settings: Settings, kind: str) -> int:
    """Weights of a half of a layer on one of its ranks."""
    weights = layer_weights(settings, kind) // settings.parallel.tensor_model_parallel_size
    if kind == EXPERTS:
        shards = settings.moe.expert_model_parallel_size * settings.expert_tensor_parallel_size
        weights += (settings.moe.num_experts or 0) * routed_weights(settings) // shards
    return weights


def state_bytes_per_weight(settings: Settings) -> float:
    """Bytes of a weight with its gradient, its fp32 master copy (with 16-bit weights) and the optimizer's moments."""
    is_mixed = settings.precision.name != "fp32"
    gradient = 4 if settings.precision.reduce_grads_in_fp32 or not is_mixed else 2
    optimizer = (4 if is_mixed else 0) + (8 if settings.optim.optimizer == "adam" else 4)
    shards = settings.gradient_reduction_size if settings.parallel.use_distributed_optimizer else 1
    shares_gradients = settings.zero_bubble.zero_bubble_shard_gradients is not None
    return _dtype_bytes(settings) + gradient / (shards if shares_gradients else 1) + optimizer / shards


def layer_activation_bytes(settings: Settings, kind: str) -> float:
    """Bytes that one half of a layer, of `kind`, keeps of one microbatch on each tensor-parallel rank, from F until B."""
    model, parallel = settings.model, settings.parallel
    tokens = settings.batch.micro_batch_size * model.seq_length / parallel.context_parallel_size
    size, tensor = _dtype_bytes(settings), parallel.tensor_model_parallel_size
    around = tensor if parallel.sequence_parallel else 1  # what tensor parallelism alone does not shard
    if model.recompute_granularity == "full":
        each = model.recompute_num_layers if model.recompute_method == "uniform" else 1
        return tokens * size * model.hidden_size / (each or 1) / around / 2.0  # of a layer's two halves
    mask = model.hidden_size if model.hidden_dropout > 0 else 0
    outside = size * 2 * model.hidden_size + mask  # inputs of the normalization and of the first linear
    if kind == ATTENTION:
        return tokens * (outside / around + _attention_bytes(settings) / tensor)
    width = model.mlp_width * (3 if model.swiglu else 2)
    if kind == EXPERTS:
        moe = settings.moe
        one = (moe.moe_ffn_hidden_size or model.mlp_width) * (3 if model.swiglu else 2) + model.hidden_size
        width = moe.moe_router_topk * one + (moe.moe_shared_expert_intermediate_size or 0) * (3 if model.swiglu else 2)
    return tokens * (outside / around + size * width / tensor)


def _attention_bytes(settings: Settings) -> float:
    """Bytes per token inside of attention: queries, keys and values, its result, and scores where they are kept."""
    model, size = settings.model, _dtype_bytes(settings)
    queries, keys, values = attention_widths(settings)
    kept = size * (queries + 2 * keys + values)
    recomputes = model.recompute_granularity == "selective" and "core_attn" in (model.recompute_modules or ("core_attn",))
    if model.attention_backend in ("local", "unfused") and not recomputes:
        dropout = size + 1 if model.attention_dropout > 0 else 0
        kept += (size + dropout) * model.num_attention_heads * model.seq_length
    return float(kept)


def _dtype_bytes(settings: Settings) -> int:
    return 4 if settings.precision.name == "fp32" else 2
