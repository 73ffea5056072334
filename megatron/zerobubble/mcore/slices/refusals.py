"""What slices do not go with, and why: options of a model's configuration, and modules of a model that was built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.mcore.slices.prefix_attention import is_transformer_engine

__all__ = ["check_attention", "check_sliced_config", "core_attentions"]

_REFUSED = {
    "moe_expert_capacity_factor": "an expert would drop tokens by the counts of a slice",
    "moe_z_loss_coeff": "it is a mean over the tokens of a call, and would be one over those of a slice",
    "mtp_num_layers": "they embed and predict tokens behind the end of a slice",
    "window_size": "a window over the keys of earlier slices is not tried",
    "tp_comm_overlap": "Transformer Engine's userbuffers have the length of whole sequences",
    "fp8": "scales would follow from the magnitudes of a slice",
    "fp4": "scales would follow from the magnitudes of a slice",
    "qk_clip": "it needs the largest score of whole sequences",
    "log_max_attention_logit": "it needs the largest score of whole sequences",
    "experimental_attention_variant": "its state is not handed from slice to slice",
    "is_hybrid_model": "the state of Mamba layers is not handed from slice to slice",
}
"""Options of megatron-core's configuration, and why none of them may be on."""


def check_sliced_call(seq_length: int, decoder_seq_length: int | None, *, collect_non_loss_data: bool) -> None:
    """Raise ConfigError for arguments of a schedule's call that slices do not go with."""
    if decoder_seq_length not in (None, seq_length):
        raise ConfigError(
            f"slices of sequences of {seq_length} tokens do not go with a decoder_seq_length of {decoder_seq_length}: leave one "
            "of the two out"
        )
    if collect_non_loss_data:
        raise ConfigError("collect_non_loss_data does not go with slices: what it collects is of a slice; leave one of them out")


def check_sliced_config(config: Any, *, name: str) -> None:
    """Check that every option of the model goes with slices.

    Args:
        config: TransformerConfig of the model.
        name: of the schedule.

    Raises:
        ConfigError: an option that does not, by name.
    """
    for option, why in _refused(config):
        raise ConfigError(f"{option} does not go with slices of microbatches (schedule {name!r}): {why}. Turn it off, or slices")


def _refused(config: Any) -> Iterator[tuple[str, str]]:
    """(name, why) of each option that is on. A release without an option has it off."""
    if config.context_parallel_size > 1:
        yield "context_parallel_size above 1", "both cut sequences, and each rank would hold parts of a slice"
    yield from ((name, why) for name, why in _REFUSED.items() if getattr(config, name, None))
    if config.num_moe_experts is not None:
        yield from _refused_balancing(config)
    if config.multi_latent_attention and config.apply_rope_fusion:
        yield "apply_rope_fusion with multi-latent attention", "its kernel takes tables of cosines that begin at position 0"


def _refused_balancing(config: Any) -> Iterator[tuple[str, str]]:
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    coefficients = coefficients if isinstance(coefficients, (list, tuple)) else [coefficients] * len(kinds)
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        if kind not in ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"):
            yield f"moe_router_load_balancing_type {kind}", "it routes the tokens of a call together, and a slice has fewer"
        elif kind == "global_aux_loss" and coefficient:
            yield (
                f"moe_aux_loss_coeff {coefficient:g} with global_aux_loss",
                "its counts are a mean over the calls so far, and a slice is one; choose aux_loss or seq_aux_loss",
            )


def core_attentions(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of each module of a chunk that has a core attention."""
    for name, module in chunk.named_modules():
        if isinstance(getattr(module, "core_attention", None), nn.Module):
            yield name, module


def check_attention(chunk: nn.Module) -> None:
    """Check that every layer can run a slice, and hand on what its tokens need of those before.

    Raises:
        ConfigError: a layer cannot; the message names it.
    """
    for name, module in chunk.named_modules():
        if "megatron.core.ssm" in type(module).__module__:
            raise ConfigError(
                f"slices: {name} is a {type(module).__name__}, whose state is not handed from slice to slice; leave slices out"
            )
        if isinstance(module, MultimodalRotaryEmbedding):
            raise ConfigError(f"slices: {name} has positions in time, height and width, which are not cut; leave slices out")
    for name, module in core_attentions(chunk):
        core = module.core_attention
        if not isinstance(core, (TorchDotProductAttention, DotProductAttention)) and not is_transformer_engine(core):
            raise ConfigError(
                f"slices: {name} computes attention by a {type(core).__name__}; give TorchDotProductAttention, megatron-core's "
                "DotProductAttention or Transformer Engine's"
            )
        if getattr(module, "attention_type", "self") != "self":
            raise ConfigError(
                f"slices: {name} is {module.attention_type}-attention, whose keys are not those of the slices before"
            )
        if module.attn_mask_type is not AttnMaskType.causal:
            raise ConfigError(
                f"slices: {name} has a {module.attn_mask_type.name} mask, and a slice can see only what is before it: give a "
                "causal one"
            )
        if isinstance(core, DotProductAttention) and core.scale_mask_softmax.scaled_masked_softmax_fusion:
            raise ConfigError(
                f"slices: {name} has masked_softmax_fusion, whose causal kernel takes as many keys as queries: turn it off, or "
                "use torch's attention"
            )
