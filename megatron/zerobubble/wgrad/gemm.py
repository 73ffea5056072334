"""The wgrad GEMM: choose the kernel that accumulates a weight gradient. It is chosen and logged once at start.

W computes ``main_grad += dY^T X`` with ``X`` of shape [tokens, in], ``dY`` of shape [tokens, out] and ``main_grad`` of shape
[out, in]. In mixed precision X and dY are bf16 or fp16 and main_grad is fp32. Three kernels, best first:

- `APEX`: ``fused_weight_gradient_mlp_cuda`` (one kernel, no temporary), if apex with its CUDA extensions is installed;
- `ADDMM`: torch's own ``addmm`` into the accumulator, with ``out_dtype`` where the dtypes differ (no temporary);
- `PLAIN`: a matmul and an add. It needs a temporary of the size of the weight, and rounds the matmul's result to the inputs'
  dtype before adding, exactly as stock megatron-core does without gradient accumulation fusion. It is used on the CPU, because
  it gives the same bits as the stock backward; ``addmm`` does not (it may add the accumulator inside its reduction).
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


def working_kernels(device: torch.device, *, input_dtype: torch.dtype, accumulator_dtype: torch.dtype) -> list[WgradKernel]:
    """All kernels that work for these dtypes on `device`, best first: the candidates of `choose_kernel`. For benchmarks."""
    apex = _apex_accumulate(accumulator_dtype) if device.type == "cuda" else None
    candidates = [] if apex is None else [WgradKernel(KernelKind.APEX, apex)]
    candidates += [WgradKernel(KernelKind.ADDMM, addmm_accumulate), WgradKernel(KernelKind.PLAIN, plain_accumulate)]
    return [kernel for kernel in candidates if _try_out(kernel, device, input_dtype, accumulator_dtype) is None]


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
    candidates = [WgradKernel(KernelKind.APEX, apex)] if apex is not None else []
    candidates.append(WgradKernel(KernelKind.ADDMM, addmm_accumulate))
    for kernel in candidates:
        problem = _try_out(kernel, device, input_dtype, accumulator_dtype)
        if problem is None:
            return kernel
        logger.warning("%s does not work for %s into %s: %s", kernel.kind.value, input_dtype, accumulator_dtype, problem)
    logger.warning("falling back to %s: each W allocates a temporary of the weight's size", plain.kind.value)
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
        fused(input_, grad_output, accumulator)

    return accumulate


def _try_out(kernel: WgradKernel, device: torch.device, input_dtype: torch.dtype, accumulator_dtype: torch.dtype) -> str | None:
    """Run the kernel on a tiny problem: None if it computes 1 + 8 * (1 * 2) = 17 everywhere, else an error message."""
    accumulator = torch.ones(16, 16, device=device, dtype=accumulator_dtype)
    grad_output = torch.ones(8, 16, device=device, dtype=input_dtype)
    input_ = torch.full((8, 16), 2.0, device=device, dtype=input_dtype)
    try:
        kernel.accumulate(accumulator, grad_output, input_)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a faulty kernel raises only here
    except (RuntimeError, TypeError, AttributeError) as error:  # AttributeError: a torch older than addmm's out_dtype
        return str(error).partition("\n")[0] or type(error).__name__
    return None if bool((accumulator == 17.0).all()) else "wrong result"
