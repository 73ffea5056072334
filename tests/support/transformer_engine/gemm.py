"""GEMMs of the extension, single and grouped, of plain and of quantized operands.

Layouts are those of cuBLAS, which reads row-major matrices as their transposes. So with `transa` alone (TN) the result is B A^T
(forward: B is the input, A the weight), with neither (NN) B A (dgrad), and with `transb` alone (NT) B^T A (wgrad).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.support.transformer_engine.float8 import dense, torch_dtype

__all__ = ["generic_gemm", "te_general_grouped_gemm"]


def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    _workspace: Any,
    _workspace_size: int,
    accumulate: bool,
    _split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, None, Any]:
    """(the result, the gradient of the bias, the input of GELU, the output of an overlapped collective)."""
    scatters = extra_output is not None
    if gelu or alpha != 1.0 or beta not in (None, float(accumulate)) or (bulk_overlap and scatters):
        raise NotImplementedError("GEMM with GELU, a factor, or beside a reduce-scatter")
    assert (comm_overlap is None) == (comm_type is None)
    if comm_overlap is not None and not scatters:
        comm_overlap.gather()  # of this GEMM's own operand, or with `bulk_overlap` of the next one's
    left, right = dense(b), dense(a)
    result = _multiply(left, transb, right, transa)
    _check(a, b, result, out, out_dtype, accumulate=accumulate)
    bias_gradient = None
    if grad and bias is not None:
        bias_gradient = left.reshape(-1, left.shape[-1]).sum(dim=0).to(torch_dtype(bias_dtype))
    elif bias is not None:
        result = result + bias.to(result.dtype)
    if scatters:
        comm_overlap.scatter(result, extra_output)
    return _written(result, out, quantizer, out_dtype, accumulate), bias_gradient, None, extra_output


def te_general_grouped_gemm(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: list[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int] | None,
    bias: list[Tensor],
    _bias_dtype: Any,
    single_output: bool,
    _gelu_inputs: Any,
    grad: bool,
    _workspaces: Any,
    _workspace_size: int,
    accumulate: bool,
    _split_accumulator: bool,
    _sm_count: int,
) -> list[Tensor]:
    """One GEMM per pair, into `out`: one tensor each, or with `single_output` rows of the first. Returns `bias`.

    Without `accumulate` a pair without tokens leaves zeros.
    """
    places = list(out[0].split(list(m_splits or ()))) if single_output else list(out)
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        left, right = dense(other), dense(one)
        result = _multiply(left, transb, right, transa)
        _check(one, other, result, places[number], out_dtype, accumulate=accumulate)
        if bias[number].numel():
            if grad:
                bias[number].copy_(left.reshape(-1, left.shape[-1]).sum(dim=0))
            else:
                result = result + bias[number].to(result.dtype)
        _written(result, places[number], None, out_dtype, accumulate)
    return bias


def _check(a: Any, b: Any, result: Tensor, out: Tensor | None, out_dtype: Any, *, accumulate: bool) -> None:
    """What the extension checks of its tensors, and what it takes for granted: it reads memory in order and knows no strides."""
    plain = [each for each in (a, b) if isinstance(each, Tensor) and not hasattr(each, "_fp8_dtype")]
    if len({each.dtype for each in plain}) > 1:
        raise RuntimeError(f"operands of {plain[0].dtype} and {plain[1].dtype}")
    if accumulate and out is None:
        raise RuntimeError("nothing to add to")
    written = [] if out is None or hasattr(out, "_fp8_dtype") else [out]
    for each in (*plain, *written):
        if not each.is_contiguous():
            raise RuntimeError(
                f"a tensor of shape {tuple(each.shape)} with strides {each.stride()}: memory would be read in order"
            )
    for each in written:
        if each.numel() != result.numel() or each.shape[-1:] != result.shape[-1:]:
            raise RuntimeError(f"an output of shape {tuple(each.shape)} for a result of {tuple(result.shape)}")
        if out_dtype is not None and torch_dtype(out_dtype) != each.dtype:
            raise RuntimeError(f"an output of {each.dtype}, and {torch_dtype(out_dtype)} asked for")


def _multiply(left: Tensor, transposes_left: bool, right: Tensor, transposes_right: bool) -> Tensor:
    if transposes_left:
        return left.reshape(-1, left.shape[-1]).t().matmul(right.reshape(-1, right.shape[-1]))
    return left.matmul(right.t() if transposes_right else right)


def _written(result: Tensor, out: Tensor | None, quantizer: Any, out_dtype: Any, accumulate: bool) -> Any:
    if quantizer is not None:
        return quantizer.quantize(result, out=out)
    if out is None:
        return result if out_dtype is None else result.to(torch_dtype(out_dtype))
    if out.data_ptr() == 0 and out.numel():
        raise RuntimeError("the output of a GEMM has no memory")
    result = result.view(out.shape)
    return out.add_(result) if accumulate else out.copy_(result)
