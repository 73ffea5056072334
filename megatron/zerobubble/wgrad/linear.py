"""The split linear: forward as usual, backward computes the input gradient only and leaves the weight gradient in the store.

Shapes: input x_sbi [sequence, batch, in] (any leading dimensions), weight [out, in], output y_sbo [sequence, batch, out]. Under
tensor parallelism ``in`` or ``out`` is a rank's share. Under sequence parallelism the input is sharded along its first
dimension: forward gathers it, B reduce-scatters the input gradient and gathers the input again for W, overlapped with the GEMM
of the input gradient, so that W itself communicates nothing.

The sums are those of megatron-core's own linear (arXiv 1909.08053, section 3, for where the collectives stand), so the results
are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.wgrad.store import SplitWeight, WeightGradStore

# torch 2.13 renamed the two collectives and warns at every call of the old names, which older releases alone have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class LinearSplit:
    """What the backward of one split linear needs to know.

    Attributes:
        split: the weight and its hooks.
        store: where B leaves the weight gradient.
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
) -> Tensor:
    """``input_ @ weight.T (+ bias)`` whose weight gradient is deferred.

    Args:
        input_: [..., in].
        weight: [out, in].
        bias: [out]; its gradient is computed in B.
        how: the weight's record and the store.
        reduce_input_grad: sum the input gradient over `group` (column-parallel linears without sequence parallelism).
        sequence_parallel: `input_` is sharded along dimension 0 over `group`.
        group: tensor-parallel group; needed for the two options above.

    Returns:
        [..., out]; its first dimension is the full sequence under sequence parallelism.
    """
    return _SplitLinear.apply(input_, weight, bias, how, reduce_input_grad, sequence_parallel, group)


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
    ) -> Tensor:
        ctx.save_for_backward(input_, weight)
        ctx.how = how
        ctx.has_bias = bias is not None
        ctx.reduce_input_grad = reduce_input_grad
        ctx.sequence_parallel = sequence_parallel
        ctx.group = group
        if sequence_parallel:
            input_ = _gather_first_dim(input_, group)[0]
        output = torch.matmul(input_, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight = ctx.saved_tensors
        gathering = None
        if ctx.sequence_parallel:
            input_, gathering = _gather_first_dim(input_, ctx.group, wait=False)
        grad_input = grad_output.matmul(weight)
        reducing = None
        if ctx.reduce_input_grad:
            reducing = dist.all_reduce(grad_input, group=ctx.group, async_op=True)
        elif ctx.sequence_parallel:
            grad_input, reducing = _reduce_scatter_first_dim(grad_input, ctx.group)
        if gathering is not None:
            gathering.wait()
        # A view when it can be: the store then holds the very tensors that autograd saved, and no copy.
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        ctx.how.store.put(ctx.how.split, grad_output, input_.reshape(-1, input_.shape[-1]))
        grad_bias = grad_output.sum(dim=0) if ctx.has_bias else None
        if reducing is not None:
            reducing.wait()
        return grad_input, None, grad_bias, None, None, None, None


def _gather_first_dim(x: Tensor, group: dist.ProcessGroup | None, *, wait: bool = True) -> tuple[Tensor, Any]:
    full = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    work = _all_gather(full, x.contiguous(), group=group, async_op=True)
    if wait and work is not None:
        work.wait()
    return full, work


def _reduce_scatter_first_dim(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
    shard = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    return shard, _reduce_scatter(shard, x.contiguous(), group=group, async_op=True)
