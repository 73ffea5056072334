"""A double of apex's `fused_weight_gradient_mlp_cuda`, with the memory contract of the real one. It is not the real thing.

The real kernel takes three pointers and three numbers (tokens, out, in) from its tensors, and hands them to cuBLAS: each matrix
is read row after row from its `data_ptr`, with its width as leading dimension. Strides are not looked at, and nothing is checked.
So a strided view is read as if it were whole, and an expanded one is read past its end; here that yields NaN.

What it cannot show: that the real extension loads, its sums' rounding, its streams, and its speed.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

APEX = "fused_weight_gradient_mlp_cuda"


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the double where Python finds apex's extension."""
    module = ModuleType(APEX)
    module.__dict__.update(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    monkeypatch.setitem(sys.modules, APEX, module)


def accumulate(input_: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """``main_grad += grad_output^T @ input`` of what lies at the three addresses.

    Args:
        input_: [tokens, in].
        grad_output: [tokens, out].
        main_grad: [out, in]; written row after row, so it has to be contiguous.
    """
    (tokens, width_in), width_out = input_.shape, grad_output.shape[1]
    assert main_grad.is_contiguous(), "the real one would write over other memory"
    assert main_grad.shape == (width_out, width_in), "the real one would write over other memory"
    sums = as_it_reads(grad_output, tokens, width_out).double().t() @ as_it_reads(input_, tokens, width_in).double()
    main_grad.copy_(main_grad.double() + sums)


def as_it_reads(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """What lies in memory from the tensor's address on, as a matrix; NaN past the end of its storage."""
    storage = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
    found = storage[tensor.storage_offset() : tensor.storage_offset() + rows * columns]
    beyond = found.new_full((rows * columns - found.numel(),), torch.nan)
    return torch.cat([found, beyond]).view(rows, columns)
