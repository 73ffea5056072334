"""LayerNorm and RMSNorm of the extension on rows of features: forward with the statistics for backward, and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.transformer_engine.float8 import torch_dtype

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_fwd"]


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    _sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor, Tensor]:
    """(y, mean, 1 / standard deviation)."""
    rows = x.float()
    mean = rows.mean(dim=-1)
    inverse = torch.rsqrt(rows.var(dim=-1, unbiased=False) + eps)
    y = (rows - mean[:, None]) * inverse[:, None] * _gamma(weight, zero_centered_gamma) + bias.float()
    return _result(y, out, quantizer, out_dtype), mean, inverse


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    _sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, Tensor]:
    """(y, None, 1 / root of the mean square)."""
    rows = x.float()
    inverse = torch.rsqrt(rows.square().mean(dim=-1) + eps)
    return _result(rows * inverse[:, None] * _gamma(weight, zero_centered_gamma), out, quantizer, out_dtype), None, inverse


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, _sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of the weight, of the bias)."""
    gradient = grad.float()
    normalized = (x.float() - mean[:, None]) * inverse[:, None]
    scaled = gradient * _gamma(weight, zero_centered_gamma)
    centered = scaled - scaled.mean(dim=-1, keepdim=True) - normalized * (scaled * normalized).mean(dim=-1, keepdim=True)
    of_weight, of_bias = (gradient * normalized).sum(dim=0), gradient.sum(dim=0)
    return (centered * inverse[:, None]).to(x.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype)


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, _sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """(gradient of x, of the weight)."""
    gradient = grad.float()
    normalized = x.float() * inverse[:, None]
    scaled = gradient * _gamma(weight, zero_centered_gamma)
    dx = (scaled - normalized * (scaled * normalized).mean(dim=-1, keepdim=True)) * inverse[:, None]
    return dx.to(x.dtype), (gradient * normalized).sum(dim=0).to(weight.dtype)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def _result(y: Tensor, out: Any, quantizer: Any, out_dtype: Any) -> Any:
    y = y.to(torch_dtype(out_dtype))
    if quantizer is not None:
        return quantizer.quantize(y, out=out)
    return y if out is None else out.copy_(y)
