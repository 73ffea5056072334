"""The scale of auxiliary losses (of routers and MTP layers) in every backward pass.

These losses have no path to the stage's output. megatron-core attaches them to it with an autograd node that passes on the
output's gradient and starts the gradient of the loss at a scale, an attribute of the node's class that every forward sets. If the
loss scale changes between a forward and its backward (as it can between the optimistic forwards of an iteration and its first
backward), the loss of the last stage would start at the new scale and the auxiliary losses at the old one. So every B sets
it again.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

__all__ = ["set_auxiliary_scales"]


def set_auxiliary_scales(config: Any, *, num_microbatches: int, context_parallel_size: int, device: torch.device) -> None:
    """Set the scale at which gradients of auxiliary losses start, in every backward until the next call.

    Args:
        config: TransformerConfig; nothing is done for a model without experts and MTP layers.
        num_microbatches: the loss is a mean over them, unless it is computed per token.
        context_parallel_size: cancels the loss function's own mean over context-parallel ranks.
        device: of the loss.
    """
    if config.num_moe_experts is None and config.mtp_num_layers is None:
        return
    scale = torch.ones(1, device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    per_token = config.calculate_per_token_loss
    if config.num_moe_experts is not None:
        MoEAuxLossAutoScaler.set_loss_scale(scale if per_token else scale * context_parallel_size / num_microbatches)
    if config.mtp_num_layers is not None:
        MTPLossAutoScaler.set_loss_scale(scale if per_token else scale / num_microbatches)
