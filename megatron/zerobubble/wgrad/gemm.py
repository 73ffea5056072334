"""The wgrad GEMM: choose the kernel that accumulates a weight gradient. It is chosen and logged once at start.

W computes ``main_grad += dY^T X`` with ``X`` of shape [tokens, in], ``dY`` of shape [tokens, out] and ``main_grad`` of shape
[out, in]. In mixed precision X and dY are bf16 or fp16 and main_grad is fp32. Three kernels, best first:

- `APEX`: ``fused_weight_gradient_mlp_cuda`` (one kernel, no temporary), if apex with its CUDA extensions is installed;
- `ADDMM`: torch's own ``addmm`` into the accumulator, with ``out_dtype`` where the dtypes differ (no temporary). Torch takes an
  fp32 accumulator with bf16 operands from 2.10 on;
- `PLAIN`: a matmul and an add. It needs a temporary of the size of the weight, and rounds the matmul's result to the inputs'
  dtype before adding, exactly as stock megatron-core does without gradient accumulation fusion. It is used on the CPU, because
  it gives the same bits as the stock backward; ``addmm`` does not (it may add the accumulator inside its reduction).

Operands come with any strides: a gradient may be an expanded or transposed view. Apex's kernel reads raw memory, row after row,
so it is given contiguous copies of such views. Torch's kernels look at the strides themselves.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Accumulate = Callable[[Tensor, Tensor, Tensor], None]
"""(accumulator [out, in], grad_output [tokens, out], input [tokens, in]) -> None; adds in place on the current stream."""


class KernelKind(enum.Enum):
    """The three kernels, best first."""

    APEX = "apex fused_weight_gradient_mlp_cuda"
    ADDMM = "torch addmm"
    PLAIN = "matmul and add"


@dataclass(frozen=True)
class WgradKernel:
    """A kernel that accumulates a weight gradient, and its kind for the log."""

    kind: KernelKind
    accumulate: Accumulate


def choose_kernel(
    device: torch.device, *, input_dtype: torch.dtype, accumulator_dtype: torch.dtype, allow_apex: bool = True
) -> WgradKernel:
    """Choose the best kernel that works for these dtypes on `device`, by trying each on a tiny problem.

    Args:
        device: device of weights and gradients.
        input_dtype: dtype of activations and output gradients.
        accumulator_dtype: dtype of ``main_grad``.
        allow_apex: False excludes apex's kernel (megatron-core's `gradient_accumulation_fusion` is off).
    """
    kernel = _choose(device, input_dtype, accumulator_dtype, allow_apex)
    logger.info("weight gradients (%s into %s on %s): %s", input_dtype, accumulator_dtype, device, kernel.kind.value)
    return kernel


def plain_accumulate(accumulator: Tensor, grad_output: Tensor, input_: Tensor) -> None:
    """`PLAIN`: the same operations, and so the same bits, as the stock backward without fusion."""
    accumulator.add_(grad_output.t().matmul(input_))


def addmm_accumulate(accumulator: Tensor, grad_output: Tensor, input_: Tensor) -> None:
    """`ADDMM`: one GEMM with beta=1 into the accumulator."""
    if accumulator.dtype == input_.dtype:
        accumulator.addmm_(grad_output.t(), input_)
    else:
        torch.ops.aten.addmm.dtype_out(accumulator, grad_output.t(), input_, accumulator.dtype, out=accumulator)


def _choose(device: torch.device, input_dtype: torch.dtype, accumulator_dtype: torch.dtype, allow_apex: bool) -> WgradKernel:
    plain = WgradKernel(KernelKind.PLAIN, plain_accumulate)
    if device.type != "cuda":
        return plain
    apex = _apex_accumulate(accumulator_dtype) if allow_apex else None
    fused = [WgradKernel(KernelKind.APEX, apex)] if apex is not None else []
    for kernel in (*fused, WgradKernel(KernelKind.ADDMM, addmm_accumulate)):
        problem = _try_out(kernel, device, input_dtype, accumulator_dtype)
        if problem is None:
            return kernel
        logger.warning("%s does not work for %s into %s: %s", kernel.kind.value, input_dtype, accumulator_dtype, problem)
    rounds = f", and rounds it to {input_dtype}" if input_dtype != accumulator_dtype else ""
    logger.warning(
        "falling back to %s: each W allocates a temporary of the weight's size%s: apex, or torch 2.10 or later, would need none",
        plain.kind.value,
        rounds,
    )
    return plain


def _apex_accumulate(accumulator_dtype: torch.dtype) -> Accumulate | None:
    try:
        import fused_weight_gradient_mlp_cuda as apex  # optional: without it ADDMM does the same work
    except ImportError:
        return None
    name = "wgrad_gemm_accum_fp32" if accumulator_dtype == torch.float32 else "wgrad_gemm_accum_fp16"
    fused = getattr(apex, name, None)
    if fused is None:
        logger.warning("the installed %s has no %s and is not used", KernelKind.APEX.value, name)
        return None

    def accumulate(accumulator: Tensor, grad_output: Tensor, input_: Tensor) -> None:
        # It ignores strides. No copy is made of what is contiguous, as nearly all operands are.
        fused(input_.contiguous(), grad_output.contiguous(), accumulator)

    return accumulate


def _try_out(kernel: WgradKernel, device: torch.device, input_dtype: torch.dtype, accumulator_dtype: torch.dtype) -> str | None:
    """Run the kernel on tiny problems whose results are exact in every dtype: None if it computes them, else an error message.

    The operands are not square, and of all the layouts that a gradient may have: a kernel that mixes up widths or ignores strides
    is found out here, and not by a loss curve.
    """
    draws = torch.Generator().manual_seed(0)  # of its own: the model's random numbers stay as they are
    for layout_of_grad, layout_of_input in _LAYOUTS:
        grad_output = layout_of_grad(_small_integers(draws, _TOKENS, _OUT, device, input_dtype))
        input_ = layout_of_input(_small_integers(draws, _TOKENS, _IN, device, input_dtype))
        accumulator = _small_integers(draws, _OUT, _IN, device, accumulator_dtype)
        expected = accumulator.double() + grad_output.double().t() @ input_.double()
        try:
            kernel.accumulate(accumulator, grad_output, input_)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a faulty kernel raises only here
        except (RuntimeError, TypeError, AttributeError) as error:  # the last two: a torch older than `out_dtype`
            return str(error).partition("\n")[0] or type(error).__name__
        if not torch.equal(accumulator.double(), expected):
            return "wrong result"
    return None


def _small_integers(draws: torch.Generator, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Integers from -3 to 3: their sums over `_TOKENS` products stay below 256, up to which bf16 has every integer."""
    return torch.randint(-3, 4, (rows, columns), generator=draws).to(device=device, dtype=dtype)


def _sliced(whole: Tensor) -> Tensor:
    """The same values as a slice of columns of a wider tensor."""
    return torch.cat([whole + 1, whole, whole + 2], dim=1)[:, whole.shape[1] : 2 * whole.shape[1]]


def _transposed(whole: Tensor) -> Tensor:
    """The same values, column after column in memory."""
    return whole.t().contiguous().t()


def _expanded(whole: Tensor) -> Tensor:
    """The first row for all rows, once in memory: as the gradient of a sum is."""
    return whole[:1].clone().expand_as(whole)


def _whole(whole: Tensor) -> Tensor:
    return whole


_TOKENS, _OUT, _IN = 16, 24, 40
_LAYOUTS = ((_whole, _whole), (_sliced, _transposed), (_transposed, _expanded), (_expanded, _sliced))
