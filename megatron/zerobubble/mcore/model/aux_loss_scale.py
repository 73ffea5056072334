"""Mixtures of experts under a schedule of ours.

Experts of the local spec are a `ColumnParallelLinear` and a `RowParallelLinear` each, so their W is split like any other; the
router, and the gate of shared experts, stay in B. An expert that got no token in a microbatch has a W of no rows. What else a
schedule has to know:

- **The losses of the routers** have no path to the stage's output. megatron-core attaches them to it with a node that passes on
  the gradient of the output and starts that of the loss at a scale which lies in the node's class, set by every F. A B that runs
  after the loss scale moved (which, with steps taken early, is between two forwards and the first backward) would start the loss
  of the last stage at the new scale and those of the routers at the old one. So every B sets it, as the F would have.
- **Expert parallelism** makes F and B of the same stage meet in collectives across the copies of the pipeline, W never. All
  copies run the same plan and, with steps taken early, come to the same verdicts; why that cannot deadlock is in ADR 13.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

__all__ = ["name_missing_gemm", "set_auxiliary_scales"]


def name_missing_gemm() -> None:
    """Without Transformer Engine megatron-core 0.16.1 leaves the name of its router GEMM undefined and then asks whether it is
    None. Say so. Changes nothing where the name exists; called where a model with experts is built."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def set_auxiliary_scales(config: Any, *, num_microbatches: int, context_parallel_size: int, device: torch.device) -> None:
    """What the gradients of the losses that routers and MTP layers add start at, in every B until this is called again.

    Args:
        config: TransformerConfig; nothing is done for a model without such losses.
        num_microbatches: over which the loss is a mean, unless it is one over tokens.
        context_parallel_size: over which the loss function's own mean is taken back.
        device: where the loss is.
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
