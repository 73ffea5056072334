"""Multi-latent attention (MLA) of megatron-core's own linears, where its modules need help.

A token's hidden state is projected down to a latent vector, and up again to keys and values per head; queries likewise. Beside
the latent vector there is one short key per token that carries the rotary embedding and that all heads share.

Two things keep megatron-core's `MLASelfAttention` from training with its own linears and attention:

- `DotProductAttention` does not take the head sizes that MLA gives it, and expects values as wide as keys.
- The linears down to latent vectors divide their columns over the tensor-parallel ranks. megatron-core all-gathers the columns,
  and the gradient of a gathered column is this rank's part alone. That is right for the latent vector, whose gradient is whole on
  every rank. But the shared key's gradient is a sum over heads, and each rank has only its own heads' part.

All weights of MLA are those of megatron-core's linears, so B and W are split as for any other (`wgrad_split`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import mark_missing_te_of_mla

__all__ = ["LatentDotProductAttention", "LatentSelfAttention"]


class LatentDotProductAttention(DotProductAttention):
    """megatron-core's `DotProductAttention` for values whose heads have another size than those of keys.

    Args:
        k_channels: head size of queries and keys; not used, it is read off them.
        v_channels: head size of values; None for `config.v_head_dim`, as megatron-core builds it first and discards it.
        others: arguments of `DotProductAttention`.
        keywords: the same.
    """

    def __init__(self, *others: Any, k_channels: int | None = None, v_channels: int | None = None, **keywords: Any) -> None:
        super().__init__(*others, **keywords)
        v_channels = v_channels or self.config.v_head_dim
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentSelfAttention(MLASelfAttention):
    """megatron-core's `MLASelfAttention` whose shared key has its whole gradient under tensor parallelism.

    Under sequence parallelism the output of the linear down to keys and values is scattered along the sequence right away, as if
    every rank had projected its own part of it. The shared key is then all-gathered along the sequence by megatron-core, whose
    backward reduce-scatters: it sums over the ranks' heads.

    Raises:
        ConfigError: tensor parallelism without sequence parallelism, where nothing sums the shared key's gradient.
    """

    def __init__(self, *others: Any, **keywords: Any) -> None:
        mark_missing_te_of_mla()
        super().__init__(*others, **keywords)
        group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp
        if group.size() == 1:
            return
        if not self.config.sequence_parallel:
            raise ConfigError(
                "multi-latent attention under tensor parallelism needs sequence parallelism: without it nothing sums the "
                "gradient of the key that all heads share over the tensor-parallel ranks; add --sequence-parallel"
            )
        self.linear_kv_down_proj.register_forward_hook(_scatter_along_sequence)


def _scatter_along_sequence(_module: torch.nn.Module, _args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """A forward hook: [s, b, columns / TP] -> [s / TP, b, columns]."""
    columns_sbc, bias = output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(columns_sbc)), bias
