"""The split on a GPU: its numbers in every format, the kernel of W, and what the allocator sees of it."""

from __future__ import annotations

import pytest
import torch

from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, _try_out, addmm_accumulate, choose_kernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support.pending import pending_bytes
from tests.wgrad.test_linear import IN, OUT, Layer, batch, run_b

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest entry: a few roundings of the format. In fp32 W takes its sum in another order."""
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_the_split_linear(dtype: torch.dtype, bias: bool, fused: bool) -> None:
    """Into a float32 main_grad, against float64. In half precision the products are exact and only their sum is rounded."""
    kernel = choose_kernel(CUDA, input_dtype=dtype, accumulator_dtype=torch.float32)
    store = WeightGradStore(kernel)
    layer = Layer(store, bias=bias, dtype=dtype, device="cuda")
    layer.weight.main_grad = torch.zeros(OUT, IN, device=CUDA)
    exact = torch.zeros(OUT, IN, device=CUDA, dtype=torch.float64)
    for microbatch in range(4):
        x, grad_output = batch(microbatch, dtype, "cuda")
        run_b(store, microbatch, layer(x), grad_output, fused=fused)
        _assert_close(x.grad, grad_output.double() @ layer.weight.detach().double(), TOLERANCE[dtype])
        exact += grad_output.reshape(-1, OUT).double().t() @ x.detach().reshape(-1, IN).double()
    for microbatch in () if fused else range(4):
        store.run(0, microbatch)
    store.check_empty()
    tolerance = TOLERANCE[dtype] if kernel.kind is KernelKind.PLAIN else 1e-5
    _assert_close(layer.weight.main_grad, exact, tolerance)


def _assert_close(actual: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert float((actual.double() - exact).abs().max()) <= tolerance * float(exact.abs().max())


@DTYPES
def test_every_kernel_that_is_offered_accumulates(dtype: torch.dtype) -> None:
    kernels = [choose_kernel(CUDA, input_dtype=dtype, accumulator_dtype=torch.float32)]  # apex's, where it is installed
    torchs = (WgradKernel(KernelKind.ADDMM, addmm_accumulate), WgradKernel(KernelKind.PLAIN, plain_accumulate))
    kernels += [each for each in torchs if _try_out(each, CUDA, dtype, torch.float32) is None]
    assert KernelKind.ADDMM in [kernel.kind for kernel in kernels], "this torch has no addmm that adds in another dtype"
    generator = torch.Generator().manual_seed(0)
    grad_output, input_ = (torch.randn(256, size, generator=generator).to(CUDA, dtype) for size in (64, 96))
    for kernel in kernels:
        accumulator = torch.ones(64, 96, device=CUDA)
        kernel.accumulate(accumulator, grad_output, input_)
        tolerance = TOLERANCE[dtype] if kernel.kind is KernelKind.PLAIN else 1e-5
        _assert_close(accumulator, 1.0 + grad_output.double().t() @ input_.double(), tolerance)


def test_w_on_another_stream_than_b_sees_what_b_wrote() -> None:
    """The store does not care which stream W runs on, provided it is made to wait for B's; entries stay alive until then."""
    store = WeightGradStore(choose_kernel(CUDA, input_dtype=torch.float32, accumulator_dtype=torch.float32))
    layer = Layer(store, bias=False, device="cuda")
    layer.weight.main_grad = torch.zeros(OUT, IN, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x, grad_output = batch(0, torch.float32, "cuda")
    torch.cuda._sleep(50_000_000)  # B's kernels come late
    run_b(store, 0, layer(x), grad_output)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        store.run(0, 0)
    torch.cuda.current_stream().wait_stream(side)
    exact = grad_output.reshape(-1, OUT).double().t() @ x.detach().reshape(-1, IN).double()
    _assert_close(layer.weight.main_grad, exact, 1e-5)


@DTYPES
def test_the_allocator_gets_back_in_w_what_b_left(dtype: torch.dtype) -> None:
    """Inputs and output gradients: no copy, and nothing they came from. The sizes are multiples of the allocator's blocks."""
    from megatron.zerobubble.wgrad.linear import LinearSplit, split_linear
    from megatron.zerobubble.wgrad.split_weight import SplitWeight

    kernel = choose_kernel(CUDA, input_dtype=dtype, accumulator_dtype=torch.float32)
    store = WeightGradStore(kernel)
    weight = torch.nn.Parameter(torch.randn(1024, 1024, device=CUDA).to(dtype))
    weight.main_grad = torch.zeros(1024, 1024, device=CUDA)
    how = LinearSplit(SplitWeight("weight", weight), store)

    def pass_through(microbatch: int) -> None:
        x = torch.randn(2048, 1024, device=CUDA).to(dtype).requires_grad_()
        output = split_linear(x, weight, None, how)
        run_b(store, microbatch, output, torch.ones_like(output))

    pass_through(0)
    store.run(0, 0)  # cuBLAS has its workspace now
    before = torch.cuda.memory_allocated()
    pass_through(1)
    assert torch.cuda.memory_allocated() - before == 2 * 2048 * 1024 * dtype.itemsize == pending_bytes(store)
    store.run(0, 1)
    assert torch.cuda.memory_allocated() == before
