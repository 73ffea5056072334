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
from megatron.zerobubble.wgrad.gemm import (
    KernelKind,
    WgradKernel,
    addmm_accumulate,
    choose_kernel,
    plain_accumulate,
)
from megatron.zerobubble.wgrad.linear import LinearSplit, split_linear
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support import apex_double
from tests.support.apex_double import APEX

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
        (None, ""),
    ],
)
def test_apex_that_does_not_work_falls_through_with_one_line(
    function: Callable[[Tensor, Tensor, Tensor], None] | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake_apex(monkeypatch, **({} if function is None else {"wgrad_gemm_accum_fp32": function}))
    assert choose().kind is KernelKind.ADDMM
    missing = f"the installed {KernelKind.APEX.value} has no wgrad_gemm_accum_fp32 and is not used"
    wrong = f"{KernelKind.APEX.value} does not work for torch.float32 into torch.float32: {reason}"
    assert warnings_in(caplog) == [missing if function is None else wrong]


def right_only_for(layout: Callable[[Tensor], bool]) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A kernel that adds one too much where an operand is not as `layout` wants it."""

    def function(accumulator: Tensor, grad_output: Tensor, input_: Tensor) -> None:
        right(input_, grad_output, accumulator)
        accumulator += not (layout(grad_output) and layout(input_))

    return function


@pytest.mark.parametrize(
    "kernel",
    [
        right_only_for(torch.Tensor.is_contiguous),
        right_only_for(lambda operand: operand.stride(1) == 1),  # wrong for transposed operands
        right_only_for(lambda operand: operand.stride(0) >= operand.stride(1)),
        right_only_for(lambda operand: 0 not in operand.stride()),  # wrong for expanded operands
        lambda accumulator, grad_output, input_: accumulator.add_((input_.t() @ grad_output).reshape(accumulator.shape)),
        lambda accumulator, grad_output, input_: apex_double.accumulate(input_, grad_output, accumulator),
    ],
    ids=["strided", "transposed", "columns first", "expanded", "out and in swapped", "raw pointers"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_is_wrong_for_some_operands_is_not_tried_with_others_only(
    kernel: Callable[[Tensor, Tensor, Tensor], None], dtype: torch.dtype
) -> None:
    assert gemm._try_out(WgradKernel(KernelKind.APEX, kernel), CPU, dtype, dtype) == "wrong result"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_kernel_has_exact_results_in_every_dtype(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    assert gemm._try_out(WgradKernel(KernelKind.PLAIN, plain_accumulate), CPU, dtype, dtype) is None
    assert gemm._try_out(WgradKernel(KernelKind.PLAIN, plain_accumulate), CPU, dtype, torch.float32) is None
    assert torch.equal(torch.get_rng_state(), before), "the model would start from other weights"


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize(
    "error", [RuntimeError("not for this device"), AttributeError("no overload named dtype_out"), TypeError("no out_dtype")]
)
def test_plain_where_nothing_else_works(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """AttributeError and TypeError are what a torch before out_dtype raises; 2.8 and 2.9 want three operands of one dtype."""
    monkeypatch.setattr(gemm, "addmm_accumulate", raising(error))
    assert choose(torch.bfloat16) == WgradKernel(KernelKind.PLAIN, plain_accumulate)
    assert warnings_in(caplog) == [
        f"{KernelKind.ADDMM.value} does not work for torch.bfloat16 into torch.float32: {error}",
        "falling back to matmul and add: each W allocates a temporary of the weight's size, and rounds it to torch.bfloat16: "
        "apex, or torch 2.10 or later, would need none",
    ]


# -- apex reads raw memory ----------------------------------------------------------------------------------------------

IN, OUT = 12, 8


def of_a_sum(y_sbo: Tensor) -> Tensor:
    """Its gradient is one number, expanded."""
    return y_sbo.sum()


def of_one_slice(y_sbo: Tensor) -> Tensor:
    """The gradient that reaches the linear is a slice of a wider one."""
    wider = torch.cat([y_sbo, 2 * y_sbo], dim=-1)
    return (wider * torch.linspace(-1, 1, 2 * OUT)).square().sum()


def of_the_transposed(y_sbo: Tensor) -> Tensor:
    """The gradient that reaches the linear is transposed: what attention does with its heads."""
    weights = torch.linspace(-1, 1, y_sbo.numel()).view(OUT, *y_sbo.shape[:2])
    return (y_sbo.permute(2, 0, 1) * weights).sum()


@pytest.mark.claims(
    "Long runs",
    "apex's kernel gets operands that it can read: strided, transposed, expanded gradients and inputs, BW and W",
    "works, on a double with the memory contract of the real one, and with the real one on an H200",
)
@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("loss", [of_a_sum, of_one_slice, of_the_transposed])
@pytest.mark.parametrize("layout", ["contiguous", "batch first", "every other column", "one row for all"])
@pytest.mark.parametrize("fused", [False, True])
def test_apex_gets_contiguous_operands_for_any_strides(
    loss: Callable[[Tensor], Tensor], layout: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    apex_double.install(monkeypatch)
    kernel = choose()
    assert kernel.kind is KernelKind.APEX
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(5, 2, 2 * IN, generator=generator)
    x_sbi = {
        "contiguous": base[..., :IN].contiguous(),
        "batch first": base[..., :IN].transpose(0, 1).contiguous().transpose(0, 1),
        "every other column": base[..., ::2],
        "one row for all": base[:1, :1, :IN].expand(5, 2, IN),
    }[layout]
    parameter = torch.nn.Parameter(torch.randn(OUT, IN, generator=generator))
    expected = torch.autograd.grad(loss(x_sbi @ parameter.t()), parameter)[0]
    parameter.main_grad = torch.zeros(OUT, IN)  # type: ignore[attr-defined]
    store = WeightGradStore(kernel)
    store.begin(0, 0, fused=fused)
    output = split_linear(x_sbi.requires_grad_(), parameter, None, LinearSplit(SplitWeight("weight", parameter), store))
    loss(output).backward()  # type: ignore[no-untyped-call]
    store.end()
    if not fused:
        store.run(0, 0)
    assert torch.allclose(parameter.main_grad, expected, atol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("fake_cuda")
def test_apex_gets_contiguous_operands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spy(input_: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        seen.extend((input_.data_ptr(), grad_output.data_ptr()))
        right(input_, grad_output, main_grad)

    fake_apex(monkeypatch, wgrad_gemm_accum_fp32=spy)
    kernel = choose()
    accumulator, grad_output, input_ = problem(CPU, torch.float32, torch.float32)
    seen.clear()
    kernel.accumulate(accumulator, grad_output, input_)
    assert seen == [input_.data_ptr(), grad_output.data_ptr()], "a copy was made"


def test_without_main_grad_the_accumulator_is_contiguous() -> None:
    """Apex would write the rows of a transposed weight's gradient as columns."""
    assert SplitWeight("weight", torch.nn.Parameter(torch.ones(OUT, IN).t())).accumulator().is_contiguous()


# -- the sums -----------------------------------------------------------------------------------------------------------


def problem(device: torch.device, dtype: torch.dtype, accumulator_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(accumulator, grad_output, input) with entries around 1."""
    generator = torch.Generator().manual_seed(1)
    accumulator = torch.randn(48, 40, generator=generator).to(device, accumulator_dtype)
    grad_output = torch.randn(96, 48, generator=generator).to(device, dtype)
    return accumulator, grad_output, torch.randn(96, 40, generator=generator).to(device, dtype)


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
