"""Which kernel is chosen, and that each computes the same sum."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.zerobubble.wgrad import gemm
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, addmm_accumulate, choose_kernel, plain_accumulate

APEX = "fused_weight_gradient_mlp_cuda"
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class _OnHost(TorchFunctionMode):
    """Makes tensors that are wanted on a CUDA device on the host: the choice can be tried without one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = CPU
        return func(*args, **kwargs)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets `choose_kernel` believe in a CUDA device. Apex is missing until a test gives one."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setitem(sys.modules, APEX, None)
    with _OnHost():
        yield


def fake_apex(monkeypatch: pytest.MonkeyPatch, **functions: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Install a module in the place of apex's. Its functions take (input, grad_output, main_grad)."""
    module = ModuleType(APEX)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, APEX, module)


def right(input_: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    main_grad += grad_output.t() @ input_


def choose(input_dtype: torch.dtype = torch.float32, accumulator_dtype: torch.dtype = torch.float32) -> WgradKernel:
    return choose_kernel(CUDA, input_dtype=input_dtype, accumulator_dtype=accumulator_dtype)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- the choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_it_is_plain_and_the_log_says_so_once(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=gemm.__name__)
    kernel = choose_kernel(CPU, input_dtype=dtype, accumulator_dtype=torch.float32)
    assert kernel == WgradKernel(KernelKind.PLAIN, plain_accumulate)
    (record,) = caplog.records
    assert record.getMessage() == f"weight gradients ({dtype} into torch.float32 on cpu): matmul and add"


def test_on_the_cpu_apex_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_apex(monkeypatch, wgrad_gemm_accum_fp32=right)
    assert choose_kernel(CPU, input_dtype=torch.float32, accumulator_dtype=torch.float32).kind is KernelKind.PLAIN


@pytest.mark.usefixtures("fake_cuda")
def test_addmm_where_it_works_and_apex_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    assert choose() == WgradKernel(KernelKind.ADDMM, addmm_accumulate)
    assert warnings_in(caplog) == []


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize(
    ("accumulator_dtype", "function"), [(torch.float32, "wgrad_gemm_accum_fp32"), (torch.bfloat16, "wgrad_gemm_accum_fp16")]
)
def test_apex_where_it_works(
    accumulator_dtype: torch.dtype, function: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_apex(monkeypatch, **{function: right})
    kernel = choose(torch.bfloat16, accumulator_dtype)
    assert kernel.kind is KernelKind.APEX
    assert warnings_in(caplog) == []
    accumulator = torch.zeros(2, 3, dtype=accumulator_dtype)
    grad_output, input_ = torch.randn(4, 2, dtype=torch.bfloat16), torch.randn(4, 3, dtype=torch.bfloat16)
    kernel.accumulate(accumulator, grad_output, input_)
    assert torch.equal(accumulator, (grad_output.t() @ input_).to(accumulator_dtype))


def wrong(input_: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    main_grad.copy_(grad_output.t() @ input_)  # overwrites instead of adding


def raising(error: Exception) -> Callable[[Tensor, Tensor, Tensor], None]:
    def function(input_: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        raise error

    return function


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (wrong, "wrong result"),
        (raising(RuntimeError("CUDA error: no kernel image\nCompile with TORCH_USE_CUDA_DSA")), "CUDA error: no kernel image"),
        (raising(TypeError("incompatible function arguments")), "incompatible function arguments"),
        (raising(RuntimeError()), "RuntimeError"),
    ],
)
def test_apex_that_does_not_work_falls_through_with_one_line(
    function: Callable[[Tensor, Tensor, Tensor], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake_apex(monkeypatch, wgrad_gemm_accum_fp32=function)
    assert choose().kind is KernelKind.ADDMM
    (line,) = warnings_in(caplog)
    assert line == f"{KernelKind.APEX.value} does not work for torch.float32 into torch.float32: {reason}"


@pytest.mark.usefixtures("fake_cuda")
def test_apex_of_a_release_without_the_function_falls_through_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_apex(monkeypatch)
    assert choose().kind is KernelKind.ADDMM
    (line,) = warnings_in(caplog)
    assert "wgrad_gemm_accum_fp32" in line


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("error", [RuntimeError("not for this device"), AttributeError("no overload named dtype_out")])
def test_plain_where_nothing_else_works(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """AttributeError is what a torch before addmm's out_dtype raises."""
    monkeypatch.setattr(gemm, "addmm_accumulate", raising(error))
    assert choose(torch.bfloat16) == WgradKernel(KernelKind.PLAIN, plain_accumulate)
    assert warnings_in(caplog) == [
        f"{KernelKind.ADDMM.value} does not work for torch.bfloat16 into torch.float32: {error}",
        "falling back to matmul and add: each W allocates a temporary of the weight's size",
    ]


# -- the sums -----------------------------------------------------------------------------------------------------------


def problem(device: torch.device, dtype: torch.dtype, accumulator_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(accumulator, grad_output, input) with entries around 1."""
    generator = torch.Generator().manual_seed(1)
    accumulator = torch.randn(48, 40, generator=generator).to(device, accumulator_dtype)
    grad_output = torch.randn(96, 48, generator=generator).to(device, dtype)
    return accumulator, grad_output, torch.randn(96, 40, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_has_the_bits_of_the_stock_backward(dtype: torch.dtype) -> None:
    accumulator, grad_output, input_ = problem(CPU, dtype, torch.float32)
    expected = accumulator.clone().add_(grad_output.t() @ input_)
    plain_accumulate(accumulator, grad_output, input_)
    assert torch.equal(accumulator, expected)


def test_addmm_with_equal_dtypes() -> None:
    accumulator, grad_output, input_ = problem(CPU, torch.float32, torch.float32)
    expected = accumulator.double() + grad_output.double().t() @ input_.double()
    addmm_accumulate(accumulator, grad_output, input_)
    assert torch.allclose(accumulator.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_addmm_on_a_gpu_accumulates_in_fp32_without_a_temporary(dtype: torch.dtype) -> None:
    accumulator, grad_output, input_ = problem(CUDA, dtype, torch.float32)
    expected = accumulator.double() + grad_output.double().t() @ input_.double()
    addmm_accumulate(accumulator.clone(), grad_output, input_)  # cuBLAS takes its workspace at the first call
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    addmm_accumulate(accumulator, grad_output, input_)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < accumulator.nbytes
    # The operands are exact in float64; what is left is the rounding of a float32 sum of 97 terms, and of TF32 where it is on.
    assert torch.allclose(accumulator.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_choice_on_a_gpu_is_not_plain(dtype: torch.dtype) -> None:
    kernel = choose_kernel(CUDA, input_dtype=dtype, accumulator_dtype=torch.float32)
    assert kernel.kind in (KernelKind.APEX, KernelKind.ADDMM)
    accumulator, grad_output, input_ = problem(CUDA, dtype, torch.float32)
    expected = accumulator.double() + grad_output.double().t() @ input_.double()
    kernel.accumulate(accumulator, grad_output, input_)
    assert torch.allclose(accumulator.double(), expected, rtol=1e-5, atol=1e-4)
