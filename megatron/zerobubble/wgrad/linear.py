"""The split linear: its backward computes only the input gradient (dgrad, B) and defers the weight gradient (wgrad, W).

Shapes: input x_sbi [sequence, batch, in] (any leading dimensions), weight [out, in], output y_sbo [sequence, batch, out]. Under
tensor parallelism ``in`` or ``out`` is the rank's shard. Under sequence parallelism the input is sharded along its first
dimension: forward all-gathers it, B reduce-scatters the input gradient, and W all-gathers it again (`sharing`). A fused backward
has no W: there the all-gather overlaps with the dgrad GEMM.

During the tensor-parallel all-reduce of the input gradient the rest of this B has to wait: it needs the result. The fused
backward overlaps the all-reduce with its own wgrad GEMM; this one overlaps it with a deferred wgrad GEMM from the store, if there
is one.

The GEMMs and collectives have the operands of those in megatron-core's own linear (arXiv 1909.08053, section 3), so the results
are bit-for-bit equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.wgrad.final import Taker, taker_of
from megatron.zerobubble.wgrad.sharing import Gathered, reduce_scatter
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore


@dataclass(frozen=True, slots=True)
class LinearSplit:
    """Options of one split linear for its backward.

    Attributes:
        split: the weight and its hooks.
        store: receives the operands of the weight gradient in B.
    """

    split: SplitWeight
    store: WeightGradStore


def split_linear(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: LinearSplit,
    *,
    reduce_input_grad: bool = False,
    sequence_parallel: bool = False,
    group: dist.ProcessGroup | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """``input_ @ weight.T (+ bias)`` whose weight gradient is deferred.

    Args:
        input_: [..., in].
        weight: [out, in].
        bias: [out]; its gradient is computed in B.
        how: the weight with its hooks, and the store.
        reduce_input_grad: all-reduce the input gradient over `group` (column-parallel linears without sequence parallelism).
        sequence_parallel: `input_` is sharded along dimension 0 over `group`.
        group: tensor-parallel group; needed for the two options above.
        output_dtype: of the output, which is not rounded to that of `input_` first; None: the same. B and W take its gradient in
            the dtype of `input_`, as megatron-core's linear does.

    Returns:
        [..., out]; its first dimension is the full sequence under sequence parallelism.
    """
    return _SplitLinear.apply(input_, weight, bias, how, reduce_input_grad, sequence_parallel, group, output_dtype)


_MM_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")
"""Whether torch's `mm` on CUDA takes `out_dtype`: from 2.8 on."""


def _product(input_: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """``input_ @ weight.T (+ bias)`` in `dtype`, rounded to it once."""
    if dtype is None or dtype == input_.dtype:
        output = torch.matmul(input_, weight.t())
        return output if bias is None else output + bias
    wide = torch.promote_types(input_.dtype, dtype)
    if input_.is_cuda and wide is torch.float32 and input_.dtype != wide and _MM_HAS_OUT_DTYPE:  # no float32 copies of operands
        flat = torch.mm(input_.reshape(-1, input_.shape[-1]), weight.t(), out_dtype=wide)
        output = flat.view(*input_.shape[:-1], weight.shape[0])
    else:
        output = torch.matmul(input_.to(wide), weight.to(wide).t())
    return (output if bias is None else output + bias).to(dtype)


_WEIGHT = 1
"""The weight's place among the tensors that `_SplitLinear` was given, and so among the edges of its node."""


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        how: LinearSplit,
        reduce_input_grad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup | None,
        output_dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(input_, weight)
        ctx.how = how
        ctx.has_bias = bias is not None
        ctx.reduce_input_grad = reduce_input_grad
        ctx.sequence_parallel = sequence_parallel
        ctx.group = group
        if sequence_parallel:
            input_ = Gathered(input_, group).wait()
        return _product(input_, weight, bias, output_dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight = ctx.saved_tensors
        how: LinearSplit = ctx.how
        grad_output = grad_output.to(input_.dtype)
        taker = taker_of(ctx.next_functions[_WEIGHT][0])
        if taker is Taker.DEFERRED and how.split.is_hooked:
            taker = Taker.AUTOGRAD
        w_gathers_input = ctx.sequence_parallel and taker is Taker.DEFERRED and how.store.defers
        gathers_input = ctx.sequence_parallel and taker is not Taker.NOBODY and not w_gathers_input
        gathering = Gathered(input_, ctx.group) if gathers_input else None
        grad_input = grad_output.matmul(weight)
        reducing = None
        if ctx.reduce_input_grad:
            reducing = dist.all_reduce(grad_input, group=ctx.group, async_op=True)
        elif ctx.sequence_parallel:
            grad_input, reducing = reduce_scatter(grad_input, ctx.group)
        if gathering is not None:
            input_ = gathering.wait()
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        if taker is not Taker.DEFERRED:  # with a graph where the caller of `autograd.grad` asked for one
            grad_bias = grad_output.sum(dim=0) if ctx.has_bias else None
            grad_weight = grad_output.t().matmul(input_.reshape(-1, input_.shape[-1])) if taker is Taker.AUTOGRAD else None
            if reducing is not None:
                reducing.wait()
            return grad_input, grad_weight, grad_bias, None, None, None, None, None
        # Views where possible: the store then holds the memory that autograd saved, and no copy. Detached first: a view holds
        # its base, the base the graph that made it, and the graph the stage's input and its gradient, all of it until W.
        # A gradient can have a graph, too, if a loss returns a tensor that it saved: megatron-core's cross entropy does.
        grad_output = grad_output.detach()
        grad_bias = grad_output.sum(dim=0) if ctx.has_bias else None
        input_ = input_.detach().reshape(-1, input_.shape[-1])
        how.store.put(how.split, grad_output, input_, gather_over=ctx.group if w_gathers_input else None)
        if reducing is not None:
            how.store.run_ahead(weight.numel())
            # On CUDA this blocks the stream, not the host: the wgrad GEMM runs after the dgrad GEMM and overlaps the all-reduce.
            reducing.wait()
        return grad_input, None, grad_bias, None, None, None, None, None
