"""The core attention of local layers by `torch.nn.functional.scaled_dot_product_attention`, in place of megatron-core's own.

megatron-core's `DotProductAttention` writes the scores of every query and key to memory, [batch, heads, sequence, sequence],
and keeps them for the backward pass. torch's kernels keep one number per query instead and compute the scores again in the
backward pass: what a layer keeps then grows with the sequence length, not with its square.

Shapes: ``s`` sequence, ``t`` tokens of all packed sequences, ``b`` microbatch, ``n`` heads per tensor-parallel rank, ``g`` key
and value heads per rank, ``d`` head size.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.attention.attention_kernels import AttentionOptions, attend, attend_packed

__all__ = ["TorchDotProductAttention", "use_torch_attention"]


class TorchDotProductAttention(MegatronModule):
    """softmax(Q K^T * scale) V, with the constructor and the call of megatron-core's `DotProductAttention`.

    It has no parameters, so a model has the same checkpoints with either module. The softmax is computed in fp32 for any
    `config.attention_softmax_in_fp32`, and `config.apply_query_key_layer_scaling`, which keeps scores in fp16 small until
    they are scaled back in fp32, changes nothing.

    Args:
        config: the model. `attention_backend` restricts torch to some of its kernels.
        layer_number: number of the layer, from 1.
        attn_mask_type: the keys that a query sees where no mask is given.
        attention_type: `self` or `cross`; makes no difference.
        attention_dropout: dropout probability; `config.attention_dropout` if None.
        softmax_scale: factor of the scores; 1 / sqrt(head size) if None.
        cp_comm_type: how context-parallel ranks communicate; there are none.
        pg_collection: process groups.

    Raises:
        ConfigError: the model needs something that torch's attention does not have.
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
    ) -> None:
        _check(config)
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.dropout_probability = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

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
        """The attention of each query to the keys that it sees. A query that sees none gets zeros.

        Args:
            query: [s, b, n, d]; packed [t, n, d].
            key: [s, b, g, d]; packed [t, g, d].
            value: [s, b, g, d]; packed [t, g, d].
            attention_mask: boolean, True where a query must not see a key, [b or 1, 1, s, s]. It alone decides, as in
                megatron-core's module. None for the mask of the mask type.
            attn_mask_type: in place of the constructor's.
            attention_bias: must be None.
            packed_seq_params: where each sequence begins, in `thd` format; None if sequences are not packed.

        Returns:
            [s, b, n * d]; packed [t, n * d].

        Raises:
            ConfigError: a mask, a bias or a format that is not supported, or `config.attention_backend` has no kernel for it.
        """
        if attention_bias is not None:
            raise ConfigError("an attention bias is not supported by torch's attention here; give a mask, or no bias")
        attention = AttentionOptions(
            mask_type=attn_mask_type or self.attn_mask_type,
            scale=self.softmax_scale,
            dropout=self.dropout_probability if self.training else 0.0,
            backend=self.config.attention_backend,
        )
        with self._random_state():
            if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
                return attend_packed(query, key, value, attention, packed_seq_params)
            return attend(query, key, value, attention, attention_mask)

    def _random_state(self) -> AbstractContextManager[None]:
        """The random state of dropout: that of the tensor-parallel rank, as in megatron-core's module.

        With sequence parallelism the caller has entered it. Recomputation restores both states.
        """
        if self.config.sequence_parallel or not self.training or self.dropout_probability == 0:
            return nullcontext()
        state: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
        return state


def use_torch_attention(model: nn.Module) -> int:
    """Replace each `DotProductAttention` of a built model by a `TorchDotProductAttention`. Nothing that is trained changes.

    For a model whose layer spec is not at hand; else give `TorchDotProductAttention` as `core_attention` of the spec.

    Args:
        model: megatron-core's; changed in place. Call it before the first forward pass.

    Returns:
        The number of replaced modules.

    Raises:
        ConfigError: a module does what torch's attention cannot; the model is as before.
    """
    found = [
        (parent, name, _torch_twin(module))
        for parent in model.modules()
        for name, module in parent.named_children()
        if type(module) is DotProductAttention
    ]
    for parent, name, twin in found:
        setattr(parent, name, twin)
    return len(found)


def _torch_twin(own: DotProductAttention) -> TorchDotProductAttention:
    scale = own.softmax_scale * (own.layer_number if own.config.apply_query_key_layer_scaling else 1)
    twin = TorchDotProductAttention(
        own.config,
        own.layer_number,
        own.attn_mask_type,
        own.attention_type,
        attention_dropout=own.attention_dropout.p,
        softmax_scale=scale,
        pg_collection=own.pg_collection,
    )
    return twin.train(own.training)


def _check(config: TransformerConfig) -> None:
    if config.attention_backend is AttnBackend.local:
        raise ConfigError(
            "attention_backend local is megatron-core's own DotProductAttention, not torch's attention: choose auto, flash, "
            "fused or unfused, or keep DotProductAttention in the layer spec"
        )
    if config.softmax_type != "vanilla":
        raise ConfigError(
            f"softmax_type {config.softmax_type} is not supported by torch's attention, only vanilla: choose attention_backend "
            "local, or Transformer Engine's layers"
        )
    if getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False):
        raise ConfigError(
            "qk_clip and log_max_attention_logit need the largest score, which torch's attention does not give: leave them out, "
            "or choose Transformer Engine's layers"
        )
    if config.window_size is not None:
        raise ConfigError(
            f"window_size {config.window_size} is not supported by torch's attention: choose attention_backend local, or "
            "Transformer Engine's layers"
        )
    if config.context_parallel_size > 1:
        raise ConfigError(
            f"torch's attention needs whole sequences, and context_parallel_size is {config.context_parallel_size}: choose "
            "Transformer Engine's layers"
        )
