"""The kernels of Transformer Engine's optimizers and of megatron-core's gradient clipping, over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.transformer_engine.float8 import scale_of

__all__ = ["adam", "compute_scale_and_scale_inv", "l2norm", "scale"]

Lists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def adam(
    _chunk_size: int,
    _noop: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam, or with `decoupled` of AdamW.

    Args:
        lists: gradients, parameters, first moments, second moments, and with mixed precision the float32 parameters.
        lr, beta1, beta2, eps, weight_decay: as in Adam.
        step: number of this step, from 1.
        decoupled: 1 for AdamW.
        bias_correction: 1 to correct the moments.
    """
    gradients, parameters, firsts, seconds = lists[:4]
    masters = lists[4] if len(lists) > 4 else parameters
    correct1, correct2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, first, second, master in zip(gradients, parameters, firsts, seconds, masters, strict=True):
        value = gradient.float()
        if not decoupled:
            value = value + weight_decay * master.float()
        first.mul_(beta1).add_(value, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(value, value, value=1 - beta2)
        update = (first.float() / correct1) / ((second.float() / correct2).sqrt() + eps)
        if decoupled:
            update = update + weight_decay * master.float()
        master.sub_((lr * update).to(master.dtype))
        if master is not parameter:
            parameter.copy_(master)


@torch.no_grad()
def scale(_chunk_size: int, noop: Tensor, lists: Lists, factor: float | Tensor) -> None:
    """Write `factor` times the first list's tensors into the second's; `noop` becomes 1 where one is not finite."""
    for source, target in zip(*lists, strict=True):
        if not bool(torch.isfinite(source).all()):
            noop.fill_(1)
        target.copy_(source * factor)


@torch.no_grad()
def l2norm(_chunk_size: int, noop: Tensor, lists: Lists, per_tensor: bool | None = False) -> tuple[Tensor, Tensor]:
    """(the norm over all tensors, the norms of each or nothing)."""
    squares = [tensor.float().square().sum() for tensor in lists[0]]
    total = torch.stack(squares).sum().sqrt().view(1) if squares else torch.zeros(1)
    if not bool(torch.isfinite(total).all()):
        noop.fill_(1)
    each = torch.stack(squares).sqrt() if per_tensor and squares else torch.empty(0)
    return total, each


@torch.no_grad()
def compute_scale_and_scale_inv(
    _chunk_size: int, _noop: Tensor, lists: Lists, limit: float, powers_of_2: bool, epsilon: float
) -> None:
    """Current scaling's scales, and their inverses, of magnitudes: the second and the third list of the first."""
    for amax, scale_, inverse in zip(*lists, strict=True):
        scale_.copy_(scale_of(amax, limit, powers_of_2=powers_of_2, epsilon=epsilon))
        inverse.copy_(scale_.reciprocal())
