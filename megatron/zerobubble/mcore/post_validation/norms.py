"""The sum of squares of a rank's gradients, left on the device.

megatron-core's `get_grad_norm_fp32` reads its result on the host: one wait for each optimizer of a chain. Without Transformer
Engine and apex it reads the norm of every gradient, too. Here the host reads nothing; `MegatronRollbackOptimizer.prepare` reads
all numbers of a stage at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from torch import Tensor
from torch.nn.utils import get_total_norm

__all__ = ["sum_of_squares"]


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares of gradients of this rank; the host does not wait.

    Args:
        gradients: that count for the norm; none on a rank without parameters.

    Returns:
        One number, shape [1], float32, on the current device. The same bits each time.
    """
    device = torch.cuda.current_device()
    if gradients:
        return _norm(list(gradients), device).reshape(1).to(torch.float32) ** 2
    return torch.zeros(1, dtype=torch.float32, device=device)


def _norm(gradients: list[Tensor], device: Any) -> Tensor:
    """2-norm by the kernel of Transformer Engine or apex that megatron-core uses, if one is installed; both give float32."""
    if clip_grads.multi_tensor_applier is getattr(clip_grads, "local_multi_tensor_applier", None):
        return get_total_norm(gradients)
    overflow = torch.zeros(1, dtype=torch.int, device=device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
    return norm
