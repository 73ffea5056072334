"""Activations of the extension's fused operations, and the padding of rows for grouped GEMMs of quantized operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    *("dgelu", "dswiglu", "fused_multi_row_padding", "fused_multi_row_unpadding", "gelu"),
    *("scaled_dswiglu", "scaled_swiglu", "swiglu"),
]


def gelu(x: Tensor, quantizer: Any) -> Any:
    """GELU by tanh."""
    return _cast(functional.gelu(x.float(), approximate="tanh").to(x.dtype), quantizer)


def dgelu(gradient: Tensor, x: Tensor, quantizer: Any) -> Any:
    """The gradient of the input of `gelu`."""
    return _cast(_gradients(lambda each: functional.gelu(each, approximate="tanh"), gradient, x)[0], quantizer)


def swiglu(x: Tensor, quantizer: Any) -> Any:
    """SwiGLU of [tokens, 2 * features], gates first."""
    return _cast(_swiglu(x.float()).to(x.dtype), quantizer)


def dswiglu(gradient: Tensor, x: Tensor, quantizer: Any) -> Any:
    """The gradient of the input of `swiglu`."""
    return _cast(_gradients(_swiglu, gradient, x)[0], quantizer)


def scaled_swiglu(x: Tensor, scales: Tensor, quantizer: Any, interleave: int) -> Any:
    """SwiGLU, each token times its scale.

    Args:
        x: [tokens, 2 * features]; with `interleave`, blocks of that many gates and that many linear values alternate.
        scales: [tokens], or one for all.
        quantizer: of the result.
        interleave: 0 for gates first.
    """
    return _cast(_scaled(x.float(), scales.float(), interleave).to(x.dtype), quantizer)


def scaled_dswiglu(
    gradient: Tensor, x: Tensor, scales: Tensor, quantizer: Any, interleave: int, wants_scales: bool
) -> tuple[Any, Tensor | None]:
    """(gradient of x, of the scales if it is wanted)."""
    of_x, of_scales = _gradients(lambda each, scale: _scaled(each, scale, interleave), gradient, x, scales)
    return _cast(of_x, quantizer), of_scales if wants_scales else None


def fused_multi_row_padding(rows: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]) -> None:
    """Copy groups of rows to `out`, where each is followed by rows of zeros."""
    for group, place in zip(rows.split(list(sizes)), out.split(list(padded)), strict=True):
        place.zero_()
        place[: len(group)] = group


def fused_multi_row_unpadding(rows: Tensor, out: Tensor, padded: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy the first rows of each group to `out`."""
    for group, place in zip(rows.split(list(padded)), out.split(list(sizes)), strict=True):
        place.copy_(group[: len(place)])


def _swiglu(x: Tensor) -> Tensor:
    gate, other = x.chunk(2, dim=-1)
    return functional.silu(gate) * other


def _scaled(x: Tensor, scales: Tensor, interleave: int) -> Tensor:
    if interleave:
        x = x.reshape(*x.shape[:-1], -1, 2, interleave).transpose(-3, -2).reshape(x.shape)
    return _swiglu(x) * scales.reshape(-1, 1)


def _gradients(function: Any, gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [each.detach().float().requires_grad_() for each in inputs]
        found = torch.autograd.grad(function(*leaves), leaves, gradient.float())
    return [each.to(of.dtype) for each, of in zip(found, inputs, strict=True)]


def _cast(result: Tensor, quantizer: Any) -> Any:
    return result if quantizer is None else quantizer.quantize(result)
