"""The core attention of local layers by `torch.nn.functional.scaled_dot_product_attention`, in place of megatron-core's own.

megatron-core's `DotProductAttention` writes the scores of every query and key to memory, [batch, heads, sequence, sequence],
and keeps them for the backward pass. torch's kernels keep one number per query instead and compute the scores again in the
backward pass: what a layer keeps then grows with the sequence length, not with its square.

Shapes: ``s`` sequence, ``b`` microbatch, ``n`` heads per tensor-parallel rank, ``g`` key and value heads per rank, ``d`` head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional

__all__ = ["TorchDotProductAttention"]


class TorchDotProductAttention(MegatronModule):  # type: ignore[misc]
    """softmax(Q K^T * scale) V, with the constructor and the call of megatron-core's `DotProductAttention`.

    It has no parameters, so checkpoints of the two modules are the same.

    Args:
        config: the model.
        layer_number: number of the layer, from 1.
        attn_mask_type: which keys a query sees if no mask is given.
        attention_type: `self` or `cross`; not used.
        attention_dropout: dropout probability; `config.attention_dropout` if None.
        softmax_scale: factor of the scores; 1 / sqrt(head size) if None.
        cp_comm_type: not used.
        pg_collection: process groups; not used.
        k_channels: head size of queries and keys; `config.kv_channels` if None. Multi-latent attention gives its own.
        v_channels: head size of values; not used, it is read off the values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.dropout_probability = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = 1 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """The attention of each query to the keys it sees.

        Args:
            query: [s, b, n, d].
            key: [s, b, g, d].
            value: [s, b, g, d of values].
            attention_mask: True where a query must not see a key, [b or 1, 1, s, s]; None for the mask of `attn_mask_type`.
            attn_mask_type: in place of the constructor's.
            attention_bias: None.
            packed_seq_params: None.

        Returns:
            [s, b, n * d of values].
        """
        mask_type = attn_mask_type or self.attn_mask_type
        causal = attention_mask is None and mask_type is AttnMaskType.causal and query.size(0) > 1
        options: dict[str, Any] = {"is_causal": causal} if attention_mask is None else {"attn_mask": ~attention_mask}
        heads_bnsd = _attend(
            query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), scale=self.softmax_scale, **options
        )
        return heads_bnsd.permute(2, 0, 1, 3).flatten(start_dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """torch's attention, [b, n, s, d of values]. Heads of two sizes get the same size, which torch's CPU kernel expects."""
    key_size, value_size = query.size(-1), value.size(-1)
    if value_size < key_size:
        value = functional.pad(value, (0, key_size - value_size))
    elif value_size > key_size:
        query, key = (functional.pad(each, (0, value_size - key_size)) for each in (query, key))
    context = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, enable_gqa=query.size(1) != key.size(1), **options
    )
    return context[..., :value_size]
