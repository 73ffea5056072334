"""Which core attention a local layer spec gets."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend

from megatron.zerobubble.mcore.attention.context_parallel import ContextParallelAttention
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention

__all__ = ["core_attention"]


def core_attention(config: TransformerConfig) -> type:
    """The module for `core_attention` of a local layer spec: torch's attention, or megatron-core's own by `local`.

    With context parallelism, torch's attention over the keys and values of all ranks.
    """
    if config.context_parallel_size > 1:
        return ContextParallelAttention
    is_own = config.attention_backend is AttnBackend.local
    return DotProductAttention if is_own else TorchDotProductAttention
