"""Casts to and from float8 with one scale per tensor (delayed and current scaling), with torch's own dtypes.

A quantizer of Transformer Engine names its kind by its class; the extension fills a `Float8Tensor` of it: data as bytes, the
inverse of the scale, and for GEMMs that need it the transposed data. Delayed scaling reads the scale that the module computed
from earlier microbatches and leaves the largest magnitude of this one in `amax`; current scaling computes the scale here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    *("bgrad_quantize", "compute_amax", "dense", "dequantize", "fp8_transpose", "fused_amax_and_scale_update_after_reduction"),
    *("quantize", "scale_of", "split_quantize", "torch_dtype"),
]

_TORCH_DTYPES = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}


def torch_dtype(number: Any) -> torch.dtype:
    """torch's dtype of the extension's number, or of a torch dtype itself."""
    return number if isinstance(number, torch.dtype) else _TORCH_DTYPES[int(number)]


def dense(operand: Any) -> Tensor:
    """An operand of a GEMM as a plain tensor; quantized ones in float32."""
    if not hasattr(operand, "_fp8_dtype"):
        assert isinstance(operand, Tensor)
        return operand
    return _from_bytes(operand, torch.float32)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """`tensor` cast by `quantizer`, into `output` if given. Where `noop` holds 1, `output` stays as it is.

    No value is read on the host, and what is there is written in place: a graph may hold it.
    """
    kind = type(quantizer).__name__
    if kind not in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        raise NotImplementedError(f"{kind} is not answered on the CPU: delayed and tensorwise scaling are")
    tensor = tensor.detach().contiguous()
    if output is None:
        output = quantizer.create_tensor_from_data(
            torch.empty(tensor.shape, dtype=torch.uint8), fake_dtype=tensor.dtype, internal=quantizer.internal
        )
    dtype = torch_dtype(quantizer.dtype)
    amax = _amax(tensor, quantizer)
    if kind == "Float8Quantizer":
        _put(quantizer.amax, amax, noop)
        scale = quantizer.scale
    else:
        scale = scale_of(amax, torch.finfo(dtype).max, powers_of_2=quantizer.force_pow_2_scales, epsilon=quantizer.amax_epsilon)
    limit = torch.finfo(dtype).max
    data = (tensor.float() * scale).clamp(-limit, limit).to(dtype).view(torch.uint8)
    if output._data is not None:
        _put(output._data, data, noop)
    _put(output._scale_inv, scale.reciprocal(), noop)
    if output._data is None or output._transpose is not None or quantizer.columnwise_usage:
        output._transpose = _put(output._transpose, _transposed(data), noop)
    output._transpose_invalid = output._transpose is None
    return output


def _put(place: Tensor | None, value: Tensor, noop: Tensor | None) -> Tensor:
    """Write `value` into `place`, unless `noop` holds 1; without a place, it is the value."""
    if place is None or place.numel() != value.numel():
        return value
    value = value.view(place.shape)
    return place.copy_(value if noop is None else torch.where(noop.view(-1)[0] != 0, place, value))


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    return _from_bytes(tensor, torch_dtype(dtype))


def split_quantize(tensor: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    """The rows of `tensor` in parts of `sizes`, each cast by its own quantizer."""
    parts = tensor.view(-1, tensor.shape[-1]).split(list(sizes))
    return [part if one is None else quantize(part, one) for part, one in zip(parts, quantizers, strict=True)]


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """(gradient of the bias, the gradient cast)."""
    of_bias = gradient.reshape(-1, gradient.shape[-1]).float().sum(dim=0).to(gradient.dtype)
    return of_bias, gradient if quantizer is None else quantize(gradient, quantizer)


def fp8_transpose(data: Tensor, _dtype: Any, out: Tensor | None = None) -> Tensor:
    """The data with its last dimension first."""
    transposed = _transposed(data)
    return transposed if out is None or out.shape != transposed.shape else out.copy_(transposed)


def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    amax.copy_(_magnitude(tensor).view(amax.shape))


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str, dtype: Any, margin: float
) -> None:
    """Delayed scaling's update: put the newest amax into each history, and compute each scale from its history."""
    start = 0
    for history, scale in zip(histories, scales, strict=True):
        size = history.shape[-1]
        amax = reduced[start : start + size]
        start += size
        history[0].copy_(amax)
        chosen = history.max(dim=0).values if algorithm == "max" else amax.clone()
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()
        limit = torch.finfo(torch_dtype(dtype)).max
        computed = limit / chosen / (2.0**margin)
        usable = (chosen > 0) & torch.isfinite(chosen)
        computed = torch.where(torch.isinf(computed), torch.finfo(torch.float32).max, computed)
        scale.copy_(torch.where(usable, computed, scale))


def _from_bytes(tensor: Any, dtype: torch.dtype) -> Tensor:
    data = tensor._data
    if data is None:  # kept only as it is transposed
        data = tensor._transpose.permute(*range(1, tensor._transpose.dim()), 0).contiguous()
    return (data.view(torch_dtype(tensor._fp8_dtype)).float() * tensor._scale_inv).to(dtype)


def _transposed(data: Tensor) -> Tensor:
    return data.permute(data.dim() - 1, *range(data.dim() - 1)).contiguous()


def _magnitude(tensor: Tensor) -> Tensor:
    return tensor.float().abs().max() if tensor.numel() else torch.zeros(())


def _amax(tensor: Tensor, quantizer: Any) -> Tensor:
    amax = _magnitude(tensor)
    if getattr(quantizer, "with_amax_reduction", False):
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return amax


def scale_of(amax: Tensor, limit: float, *, powers_of_2: bool, epsilon: float) -> Tensor:
    """Current scaling's scale, by which the largest magnitude becomes `limit`."""
    amax = amax.clamp(min=epsilon)
    scale = torch.where(amax > 0, limit / amax, torch.ones_like(amax))
    scale = torch.where(torch.isfinite(scale), scale, torch.full_like(scale, torch.finfo(torch.float32).max))
    return torch.exp2(torch.floor(torch.log2(scale))) if powers_of_2 else scale
