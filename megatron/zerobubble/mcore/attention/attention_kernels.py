"""torch's attention for tensors as megatron-core lays them out: whole sequences of one length, or packed ones.

Shapes as in `mcore.attention.torch_attention`.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.attention.attention_masks import mask_options, once_per_tensor

__all__ = ["AttentionOptions", "attend", "attend_packed"]

_KERNELS = {
    AttnBackend.flash: [SDPBackend.FLASH_ATTENTION],
    AttnBackend.fused: [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    AttnBackend.unfused: [SDPBackend.MATH],
}
"""torch's kernels for the words of `--attention-backend`; `auto` is all of them."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How attention is computed, beside its tensors."""

    mask_type: AttnMaskType
    """Which keys a query sees where no mask says it."""
    scale: float
    """Factor of the scores."""
    dropout: float
    """Probability with which the weight of a key is dropped."""
    backend: AttnBackend
    """Which of torch's kernels may run."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, attention: AttentionOptions, attention_mask: Tensor | None = None
) -> Tensor:
    """The attention of whole sequences.

    Args:
        query: [s, b, n, d].
        key: [s, b, g, d].
        value: [s, b, g, d].
        attention: how.
        attention_mask: True where a query must not see a key, broadcast to [b, n, s, s]; or None.

    Returns:
        [s, b, n * d].

    Raises:
        ConfigError: none of these kernels can do it.
    """
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    num_heads, head_size = query.size(1), query.size(3)
    options = mask_options(attention.mask_type, query, key, attention_mask)
    options |= {"scale": attention.scale, "dropout_p": attention.dropout}
    if num_heads != key.size(1):
        has_entries = "attn_mask" in options and not isinstance(options["attn_mask"], CausalBias)
        if _knows_groups(query.device.type, query.dtype, head_size, has_mask=has_entries, backend=attention.backend):
            options["enable_gqa"] = True
        else:
            key, value = (each.repeat_interleave(num_heads // each.size(1), dim=1) for each in (key, value))
    value = _apart(value, query, key)
    with _kernels(attention.backend):
        try:
            heads_bnsd = functional.scaled_dot_product_attention(query, key, value, **options)
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            raise ConfigError(_no_kernel(attention.backend, query, options)) from error
    return heads_bnsd.permute(2, 0, 1, 3).flatten(start_dim=2)


def _apart(value: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The values, as a copy where they are part of a larger tensor that is otherwise free.

    Attention keeps them for the backward pass, and a view keeps all of its storage: with rotary positions, which make new queries
    and keys, the whole output of the QKV projection.
    """
    storage = value.untyped_storage()
    if not value.requires_grad or storage.nbytes() <= value.nbytes:
        return value
    if any(each.untyped_storage()._cdata == storage._cdata for each in (query, key)):
        return value
    return value.clone()


def _knows_groups(device_type: str, dtype: torch.dtype, head_size: int, *, has_mask: bool, backend: AttnBackend) -> bool:
    """Whether a kernel that may run takes fewer heads of keys than of queries. If none does, torch keeps the scores, silently.

    On CUDA only flash attention surely takes them, where it can run. Not run on a GPU.
    """
    if device_type != "cuda" or backend is AttnBackend.unfused:
        return True
    can_be_flash = dtype in (torch.float16, torch.bfloat16) and head_size <= 256 and not has_mask
    return can_be_flash and backend is not AttnBackend.fused


def _kernels(backend: AttnBackend) -> AbstractContextManager[None]:
    return nullcontext() if backend is AttnBackend.auto else sdpa_kernel(_KERNELS[backend])


def _no_kernel(backend: AttnBackend, query: Tensor, options: dict[str, Any]) -> str:
    mask = "a mask" if "attn_mask" in options else "no mask"
    return (
        f"--attention-backend {backend.name} has no kernel for this attention on {query.device.type}: {query.dtype}, head size "
        f"{query.size(3)}, dropout {options['dropout_p']:g}, {mask}; choose auto"
    )


def attend_packed(query: Tensor, key: Tensor, value: Tensor, attention: AttentionOptions, packed: PackedSeqParams) -> Tensor:
    """The attention of sequences that are packed into one, each to itself. Queries behind the last one get zeros.

    One call of torch's attention per sequence: its kernels for packed sequences need a GPU and half precision, and have no
    dropout. The first layer of a microbatch reads the lengths, on a GPU with a synchronization of the host.

    Args:
        query: [t, n, d].
        key: [t, g, d].
        value: [t, g, d].
        attention: how each sequence attends to itself.
        packed: where each sequence begins.

    Returns:
        [t, n * d].
    """
    contexts, end = [], 0
    for tokens in _sequences(packed):
        own_query, own_key, own_value = (each[tokens].unsqueeze(1) for each in (query, key, value))
        contexts.append(attend(own_query, own_key, own_value, attention).squeeze(1))
        end = tokens.stop
    rest = query.new_zeros(query.size(0) - end, query.size(1) * value.size(2))
    return torch.cat([*contexts, rest])


def _sequences(packed: PackedSeqParams) -> list[slice]:
    """The tokens of each sequence that has some."""
    if packed.cu_seqlens_q is None:
        raise ConfigError("packed sequences in thd format need cu_seqlens_q, where each sequence begins")
    begins = once_per_tensor(packed.cu_seqlens_q, "list", Tensor.tolist)
    others = (packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded)
    if any(each is not None and once_per_tensor(each, "list", Tensor.tolist) != begins for each in others):
        raise ConfigError(
            "packed sequences with padding in between, or with other keys than queries, are not supported by torch's attention: "
            "pack them without, or choose Transformer Engine's layers"
        )
    return [slice(begin, end) for begin, end in itertools.pairwise(begins) if end > begin]
