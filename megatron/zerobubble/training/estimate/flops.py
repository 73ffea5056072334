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
    MTP layer      2h * h, one more layer like the last, and one more head (arXiv 2412.19437, section 2.2)

Causal attention needs half of the scores, so that half is counted, as Megatron-LM's log does and the benchmarks of W, which
follow the paper's table, do not. Left out, as everywhere: normalization, activations, softmax, biases, embedding look-ups. For a
dense GPT with f = 4h this is formula 3 of arXiv 2104.04473 without recomputation, 72 s l h^2 (1 + s/6h + V/12lh) per sample, with
half its scores.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.estimate.layer_sizes import (
    ATTENTION,
    EXPERTS,
    attention_widths,
    kinds_per_layer,
    layer_weights,
    routed_weights,
)

__all__ = ["Flops", "flops_per_sample", "iteration_flops", "tflops_per_gpu"]

_BACKWARD_AND_FORWARD = 3
"""GEMMs of a training step per GEMM of its forward pass: F, B and W."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of the forward and backward passes, by where they are."""

    linears: float
    """GEMMs with weights inside the layers."""
    scores: float
    """Attention scores and the sums of values that they weigh: these grow with the square of the sequence length."""
    head: float
    """Projections to the vocabulary, of the model's head and of every MTP layer."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.linears + self.scores + self.head


def iteration_flops(settings: Settings, *, vocab_size: int) -> float:
    """FLOPs of one training iteration of the whole job, over all ranks.

    Divide by the iteration's seconds and `settings.world_size` for FLOP/s per GPU, and that by the peak for MFU.

    Args:
        settings: the model and its batch.
        vocab_size: the tokenizer's vocabulary size, before padding.
    """
    return flops_per_sample(settings, vocab_size=vocab_size).total * settings.global_batch_size


def flops_per_sample(settings: Settings, *, vocab_size: int) -> Flops:
    """FLOPs of the forward and backward passes of one sample of --seq-length tokens; see the module's formula.

    Args:
        settings: the model.
        vocab_size: the tokenizer's vocabulary size, before padding.
    """
    model = settings.model
    layers, num_mtp_layers = kinds_per_layer(settings), model.mtp_num_layers or 0
    kinds = "".join(layers) + layers[-1] * num_mtp_layers  # the layer inside an MTP layer is like the model's last one
    linears = sum(_linear_macs(settings, kind) for kind in kinds) + num_mtp_layers * 2 * model.hidden_size**2
    heads = (1 + num_mtp_layers) * model.hidden_size * settings.padded_vocab_size(vocab_size)
    each = 2.0 * _BACKWARD_AND_FORWARD * model.seq_length
    return Flops(linears=each * linears, scores=each * kinds.count(ATTENTION) * _score_macs(settings), head=each * heads)


def _linear_macs(settings: Settings, kind: str) -> int:
    """Multiply-adds per token of the weights of one half of a layer, forward."""
    macs = layer_weights(settings, kind)
    if kind == EXPERTS:
        macs += settings.moe.moe_router_topk * routed_weights(settings)
    return macs


def _score_macs(settings: Settings) -> float:
    """Multiply-adds per token of the scores and of the weighted values of one attention layer: on average a token sees half of
    the sequence."""
    queries, _, values = attention_widths(settings)
    return (queries + values) * settings.model.seq_length / 2.0


def tflops_per_gpu(flops: float, seconds: float, *, world_size: int) -> float:
    """TFLOP/s per GPU (per rank on the CPU), of `flops` of the whole job in `seconds`."""
    return flops / seconds / world_size / 1e12
