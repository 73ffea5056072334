"""FLOPs of a model's training iteration, from its flags: for TFLOP/s per GPU and model FLOPs utilization (MFU).

The model's operations are counted, not the device's: recomputation adds none, so layouts and schedules are compared by the same
work (arXiv 2204.02311, appendix B). A GEMM of a token with a weight of n elements is n multiply-adds of 2 FLOPs each, and the
backward pass does it twice more, for the input gradient (B) and the weight gradient (W) (arXiv 2401.10241, table 1)::

    FLOPs = 3 * 2 * samples * s * (sum of the layers' multiply-adds per token + heads * h * V)

    attention      h * (q + k + v) + q/2 * s + v'/2 * s + v' * h        widths q, k, v over all heads, v' = v over query heads
      MHA, GQA     q = v' = heads * d,  k = v = groups * d
      MLA          q is projected through --q-lora-rank, k and v through --kv-lora-rank + the rotated part (arXiv 2405.04434, 2.1)
    MLP            2 * h * f, and 3 * h * f with SwiGLU
    experts        topk MLPs of the expert's width, the shared expert, and h * E of the router
    Mamba-2        h * (2e + 2 * G * N + H) + e * h + c * (e + 2 * G * N) + 3 * e * N         (arXiv 2405.21060, section 7.1)
    MTP layer      2h * h, one more layer like the last, and one more head (arXiv 2412.19437, section 2.2)

Causal attention needs half of the scores, so that half is counted, as Megatron-LM's log does and the benchmarks of W, which
follow the paper's table, do not. A linear recurrence of N states is 3 multiply-adds per state and channel: decay, input, output.
Left out, as everywhere: normalization, activations, softmax, biases, embedding look-ups. For a dense GPT with f = 4h this is
formula 3 of arXiv 2104.04473 without recomputation, 72 s l h^2 (1 + s/6h + V/12lh) per sample, with half its scores.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.plan.partition.hybrid_pattern import EXPERTS, MAMBA, HybridPattern
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["Flops", "flops_per_sample", "iteration_flops"]

_BACKWARD_AND_FORWARD = 3
"""GEMMs of a training step per GEMM of its forward pass: F, B and W."""

_MAMBA_STATE, _MAMBA_HEAD, _MAMBA_GROUPS, _MAMBA_EXPAND, _MAMBA_CONV = 128, 64, 8, 2, 4
"""megatron-core's defaults, which no flag of ours changes: states per channel N, channels per head, groups G, e = expand * h,
width of the convolution c."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of the forward and backward passes, by where they are."""

    linears: float
    """GEMMs with weights inside the layers, and what Mamba layers have in place of scores."""
    scores: float
    """Attention scores and the sums of values that they weigh: these grow with the square of the sequence length."""
    head: float
    """Projections to the vocabulary, of the model's head and of every MTP layer."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.linears + self.scores + self.head


def iteration_flops(settings: Settings, *, vocab_size: int, samples: int | None = None) -> float:
    """FLOPs of one training iteration of the whole job, over all ranks.

    Divide by the iteration's seconds and `settings.world_size` for FLOP/s per GPU, and that by the peak for MFU.

    Args:
        settings: the model and its batch.
        vocab_size: the tokenizer's vocabulary size, before padding.
        samples: samples of the iteration; None is --global-batch-size. They differ under --rampup-batch-size.
    """
    return flops_per_sample(settings, vocab_size=vocab_size).total * (settings.global_batch_size if samples is None else samples)


def flops_per_sample(settings: Settings, *, vocab_size: int) -> Flops:
    """FLOPs of the forward and backward passes of one sample of --seq-length tokens; see the module's formula.

    Args:
        settings: the model.
        vocab_size: the tokenizer's vocabulary size, before padding.
    """
    model = settings.model
    kinds = _layers(settings)
    num_mtp_layers = model.mtp_num_layers or 0
    kinds += kinds[-2:] * num_mtp_layers  # the layer inside an MTP layer is like the model's last one
    linears = sum(_linear_macs(settings, kind) for kind in kinds) + num_mtp_layers * 2 * model.hidden_size**2
    heads = (1 + num_mtp_layers) * model.hidden_size * settings.padded_vocab_size(vocab_size)
    each = 2.0 * _BACKWARD_AND_FORWARD * model.seq_length
    return Flops(linears=each * linears, scores=each * kinds.count("*") * _score_macs(settings), head=each * heads)


def _layers(settings: Settings) -> str:
    """The kinds of all layers, in the letters of --hybrid-layer-pattern; a transformer layer of a GPT is two."""
    pattern = settings.model.hybrid_layer_pattern
    if pattern is not None:
        return HybridPattern.parse(pattern).layers
    return "".join("*" + (EXPERTS if has_experts else "-") for has_experts in settings.moe_layer_pattern)


def _linear_macs(settings: Settings, kind: str) -> int:
    """Multiply-adds per token of the weights of one layer, forward."""
    if kind == "*":
        return _latent_macs(settings) if settings.mla.multi_latent_attention else _attention_macs(settings)
    if kind == EXPERTS:
        return _expert_macs(settings)
    return _mamba_macs(settings) if kind == MAMBA else _mlp_macs(settings, settings.model.mlp_width)


def _attention_macs(settings: Settings) -> int:
    model = settings.model
    queries = model.num_attention_heads * model.head_width
    keys = model.num_query_groups * model.head_width if model.group_query_attention else queries
    return model.hidden_size * (2 * queries + 2 * keys)


def _latent_macs(settings: Settings) -> int:
    hidden, heads, mla = settings.model.hidden_size, settings.model.num_attention_heads, settings.mla
    queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    from_tokens = hidden * queries if mla.q_lora_rank is None else (hidden + queries) * mla.q_lora_rank
    keys_and_values = heads * (mla.qk_head_dim + mla.v_head_dim)
    down = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    return from_tokens + down + mla.kv_lora_rank * keys_and_values + heads * mla.v_head_dim * hidden


def _score_macs(settings: Settings) -> float:
    """Multiply-adds per token of the scores and of the weighted values of one attention layer: on average a token sees half of
    the sequence."""
    model, mla = settings.model, settings.mla
    query, value = model.head_width, model.head_width
    if mla.multi_latent_attention:
        query, value = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim
    return model.num_attention_heads * (query + value) * model.seq_length / 2.0


def _mlp_macs(settings: Settings, width: int) -> int:
    return settings.model.hidden_size * width * (3 if settings.model.swiglu else 2)


def _expert_macs(settings: Settings) -> int:
    moe, hidden = settings.moe, settings.model.hidden_size
    shared = moe.moe_shared_expert_intermediate_size or 0
    routed = moe.moe_router_topk * _mlp_macs(settings, moe.moe_ffn_hidden_size or settings.model.mlp_width)
    gate = hidden if shared and moe.moe_shared_expert_gate else 0
    return routed + _mlp_macs(settings, shared) + gate + hidden * (moe.num_experts or 0)


def _mamba_macs(settings: Settings) -> int:
    hidden = settings.model.hidden_size
    inner, states = _MAMBA_EXPAND * hidden, _MAMBA_GROUPS * _MAMBA_STATE
    projections = hidden * (2 * inner + 2 * states + inner // _MAMBA_HEAD) + inner * hidden
    return projections + _MAMBA_CONV * (inner + 2 * states) + 3 * inner * _MAMBA_STATE
