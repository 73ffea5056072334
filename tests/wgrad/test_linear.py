"""The split linear: the same bits as torch's own, with the weight gradient computed in W and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.linear import LinearSplit, split_linear
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support.pending import pending_bytes
from tests.support.tolerances import OTHER_ORDER

SEQUENCE, BATCH, IN, OUT = 5, 2, 12, 8
GEMMS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "matmul", "linear", "dot"}


class GemmCount(TorchDispatchMode):
    """Counts the GEMMs that reach the dispatcher."""

    def __init__(self, names: set[str] = GEMMS) -> None:
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.names
        return func(*args, **(kwargs or {}))


def make_store() -> WeightGradStore:
    return WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate), rank=1)


class Layer:
    """A linear's parameters, twice: once for the split, once for torch's own."""

    def __init__(
        self,
        store: WeightGradStore,
        *,
        bias: bool,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(OUT, IN, generator=generator).to(device, dtype))
        self.bias = torch.nn.Parameter(torch.randn(OUT, generator=generator).to(device, dtype)) if bias else None
        self.how = LinearSplit(SplitWeight("weight", self.weight), store)

    def __call__(self, x_sbi: Tensor) -> Tensor:
        return split_linear(x_sbi, self.weight, self.bias, self.how)


def batch(seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(x_sbi, gradient of y_sbo) of one microbatch."""
    generator = torch.Generator().manual_seed(100 + seed)
    x_sbi = torch.randn(SEQUENCE, BATCH, IN, generator=generator).to(device, dtype)
    return x_sbi.requires_grad_(), torch.randn(SEQUENCE, BATCH, OUT, generator=generator).to(device, dtype)


def run_b(store: WeightGradStore, microbatch: int, output: Tensor, grad_output: Tensor, *, fused: bool = False) -> None:
    store.begin(0, microbatch, fused=fused)
    output.backward(grad_output)
    store.end()


# -- the same bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_as_torch_over_several_microbatches(dtype: torch.dtype, in_fp32: bool, bias: bool, fused: bool) -> None:
    """Added up by torch in the weight's dtype, or in a float32 `main_grad`."""
    store = make_store()
    layer = Layer(store, bias=bias, dtype=dtype)
    expected = torch.zeros(OUT, IN)
    if in_fp32:
        layer.weight.main_grad = torch.zeros(OUT, IN)
    weight = layer.weight.detach().clone().requires_grad_()
    own_bias = layer.bias.detach().clone().requires_grad_() if layer.bias is not None else None
    for microbatch in range(4):
        x, grad_output = batch(microbatch, dtype)
        own_x = x.detach().clone().requires_grad_()
        output, own_output = layer(x), F.linear(own_x, weight, own_bias)
        assert torch.allclose(output, own_output, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.1)
        run_b(store, microbatch, output, grad_output, fused=fused)
        own_output.backward(grad_output)
        assert torch.equal(x.grad, own_x.grad)
        expected += grad_output.reshape(-1, OUT).t() @ own_x.detach().reshape(-1, IN)
    if not fused:
        assert layer.weight.grad is None
        for microbatch in range(4):
            store.run(0, microbatch)
    store.check_empty()
    assert (layer.weight.grad is None) is in_fp32
    assert torch.equal(*((layer.weight.main_grad, expected) if in_fp32 else (layer.weight.grad, weight.grad)))
    if layer.bias is not None:
        assert torch.equal(layer.bias.grad, own_bias.grad)


class _InAnotherDtype(torch.autograd.Function):
    """A fused linear with an output of another dtype: the exact product, rounded once; backward in the dtype of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_output = grad_output.to(x.dtype)
        flat = grad_output.flatten(0, -2)
        bias_gradient = flat.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_output @ weight, flat.t() @ x.flatten(0, -2), bias_gradient, None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "output_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_an_output_of_another_dtype_is_not_rounded_to_that_of_the_input(
    dtype: torch.dtype, output_dtype: torch.dtype, bias: bool
) -> None:
    """As for float32 logits. B and W get the gradient in the dtype of the input, and the same bits as the fused backward."""
    store = make_store()
    layer = Layer(store, bias=bias, dtype=dtype)
    x, grad_output = batch(0, dtype)
    grad_output = grad_output.to(output_dtype)
    output = split_linear(x, layer.weight, layer.bias, layer.how, output_dtype=output_dtype)
    own_x, weight, *rest = [each.detach().clone().requires_grad_() for each in (x, layer.weight, layer.bias) if each is not None]
    expected = _InAnotherDtype.apply(own_x, weight, rest[0] if rest else None, output_dtype)
    assert output.dtype is output_dtype
    if output_dtype is torch.float32:
        assert torch.allclose(output, expected, rtol=OTHER_ORDER, atol=OTHER_ORDER), "only the order of a float32 sum"
        assert not torch.equal(output, output.to(dtype).to(output_dtype)), "not rounded on the way"
    else:
        assert torch.allclose(output, expected, rtol=2**-7, atol=2**-7), "rounded to bf16 once"
    run_b(store, 0, output, grad_output)
    expected.backward(grad_output)
    store.run(0, 0)
    assert x.grad.dtype is layer.weight.grad.dtype is dtype
    assert torch.equal(x.grad, own_x.grad)
    assert torch.equal(layer.weight.grad, weight.grad)
    if layer.bias is not None:
        assert torch.equal(layer.bias.grad, rest[0].grad)


@pytest.mark.parametrize("shape", [(IN,), (7, IN), (2, 3, 4, IN)])
def test_any_leading_dimensions_and_strides(shape: tuple[int, ...]) -> None:
    store = make_store()
    layer = Layer(store, bias=True)
    weight = layer.weight.detach().clone().requires_grad_()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    output, own = layer(x), F.linear(x, weight, layer.bias.detach())
    assert output.shape == own.shape
    gradient = torch.randn(own.shape[::-1], generator=torch.Generator().manual_seed(1)).permute(*reversed(range(own.dim())))
    run_b(store, 0, output, gradient)
    own.backward(gradient)
    store.run(0, 0)
    assert torch.allclose(layer.weight.grad, weight.grad, rtol=1e-5, atol=OTHER_ORDER)
    assert torch.allclose(layer.bias.grad, gradient.reshape(-1, OUT).sum(0), rtol=1e-5, atol=1e-5)


# -- autograd's rules ---------------------------------------------------------------------------------------------------


def test_backward_outside_of_any_b_computes_the_weight_gradient_at_once() -> None:
    """Also of a weight that is used twice, whose hooks are called once; also while Ws of earlier Bs wait."""
    store = make_store()
    layer = Layer(store, bias=False)
    calls: list[int] = []
    layer.how.split.hooks.append(lambda: calls.append(1))
    weight = layer.weight.detach().clone().requires_grad_()
    (x, grad_output), (z, _) = batch(0), batch(1)
    run_b(store, 0, layer(z), grad_output)
    (layer(x) + layer(z)).backward(grad_output)
    assert calls == [1]
    store.run(0, 0)
    assert calls == [1, 1]
    (F.linear(x.detach(), weight) + F.linear(z.detach(), weight)).backward(grad_output)
    F.linear(z.detach(), weight).backward(grad_output)
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-5, atol=1e-5)  # sums in another order
    store.check_empty()


def test_a_backward_outside_of_any_b_that_fails_spoils_no_later_one() -> None:
    store = make_store()
    layer = Layer(store, bias=False)
    calls: list[int] = []
    layer.how.split.hooks.append(lambda: calls.append(1))
    x, grad_output = batch(0)
    x.requires_grad_()
    doubled = x * 2

    def fail(_: torch.Tensor) -> None:
        raise ValueError("stop")

    doubled.register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        layer(doubled).backward(grad_output)
    assert calls == []
    layer(x).backward(grad_output)
    assert calls == [1]


def test_an_input_without_gradient_still_gives_the_weight_its_own() -> None:
    """The first stage's first linear behind a frozen embedding."""
    store = make_store()
    layer = Layer(store, bias=False)
    x, grad_output = batch(0)
    x = x.detach()
    run_b(store, 0, layer(x), grad_output)
    store.run(0, 0)
    assert x.grad is None
    assert torch.equal(layer.weight.grad, grad_output.reshape(-1, OUT).t() @ x.reshape(-1, IN))


# -- memory -------------------------------------------------------------------------------------------------------------


def test_the_operands_live_from_b_to_w_and_no_longer() -> None:
    store = make_store()
    layer = Layer(store, bias=False)
    x, grad_output = batch(0)
    hidden = x * 2  # not a leaf: autograd alone keeps it
    gradient = grad_output * 2
    refs = [StorageWeakRef(hidden.untyped_storage()), StorageWeakRef(gradient.untyped_storage())]
    output = layer(hidden)
    del hidden
    run_b(store, 0, output, gradient)
    del gradient, output
    assert not any(ref.expired() for ref in refs)
    assert pending_bytes(store) == (SEQUENCE * BATCH * (IN + OUT)) * 4
    store.run(0, 0)
    assert all(ref.expired() for ref in refs)


class _ReturnsWhatItSaved(torch.autograd.Function):
    """A loss whose gradient is the tensor that it was given, history included, as that of megatron-core's cross entropy is."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return logits


@pytest.mark.parametrize("is_head", [False, True])
def test_inputs_from_before_the_linear_are_free_after_b(is_head: bool) -> None:
    """The stage's input and its gradient: the input of the linear was computed from them, and W needs only the former."""
    store = make_store()
    layer = Layer(store, bias=False)
    stage_input, grad_output = batch(0)
    output = layer(F.layer_norm(stage_input, (IN,)))
    if is_head:
        output, grad_output = _ReturnsWhatItSaved.apply(output), torch.ones(())
    run_b(store, 0, output, grad_output)
    del output
    assert stage_input.grad is not None
    before = [StorageWeakRef(tensor.untyped_storage()) for tensor in (stage_input, stage_input.grad)]
    del stage_input
    assert all(storage.expired() for storage in before)
    store.run(0, 0)


def test_nothing_is_copied_for_the_store() -> None:
    """A gradient that is contiguous in its last dimension is kept as a view."""
    seen: list[tuple[int, int]] = []

    def spy(accumulator: Tensor, grad_output: Tensor, input_: Tensor) -> None:
        seen.append((grad_output.data_ptr(), input_.data_ptr()))

    store = WeightGradStore(WgradKernel(KernelKind.PLAIN, spy))
    layer = Layer(store, bias=False)
    x, grad_output = batch(0)
    run_b(store, 0, layer(x), grad_output)
    store.run(0, 0)
    assert seen == [(grad_output.data_ptr(), x.data_ptr())]


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_a_full_backward_reports_a_weight_that_is_used_once_when_autograd_has_no_more_for_it(is_shared: bool) -> None:
    """Three linears in a row; the first one's weight may be the third one's, too. At the end every weight was reported once."""
    store, seen = make_store(), []
    splits = [SplitWeight(name, torch.nn.Parameter(torch.randn(4, 4))) for name in "abc"]
    if is_shared:
        splits[2] = splits[0]
    for microbatch, is_last in enumerate([False, True]):
        seen.clear()
        x = torch.randn(2, 4, requires_grad=True)
        for split in splits:
            x = split_linear(x, split.weight, None, LinearSplit(split, store))
            x.register_hook(lambda _, name=split.name: seen.append(f"gradient of {name}"))
        store.begin(0, microbatch, fused=is_last, at_once=is_last)
        for split in {id(split): split for split in splits}.values():
            split.is_final, split.hooks[:] = is_last, [lambda split=split: seen.append(split.name)]
        x.sum().backward()
        if is_last:
            own = ["gradient of c", "c", "gradient of b", "b", "gradient of a", "a"]
            assert seen == (["gradient of a", "gradient of b", "b", "gradient of a"] if is_shared else own)
        store.end()
        if not is_last:
            store.run(0, microbatch)
    assert [name for name in seen if len(name) == 1] == (["b", "a"] if is_shared else ["c", "b", "a"])


def test_a_weight_that_is_used_again_after_its_report_is_an_error() -> None:
    store = make_store()
    split = SplitWeight("a", torch.nn.Parameter(torch.randn(4, 4)))
    split.hooks.append(lambda: None)
    for microbatch, is_last in enumerate([False, True]):
        store.begin(0, microbatch, fused=is_last, at_once=is_last)
        split.is_final = is_last
        for _ in range(1 + is_last):
            x = split_linear(torch.randn(2, 4), split.weight, None, LinearSplit(split, store)).sum()
            if is_last and split.is_reported:
                with pytest.raises(WeightGradStoreError, match="a is used several times in this backward pass, and once in the"):
                    x.backward()
            else:
                x.backward()
        if not is_last:
            store.end()
            store.run(0, microbatch)
