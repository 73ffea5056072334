"""Modules that keep back weight gradients themselves under the W of the store: Transformer Engine's Linear and GroupedLinear.

They run in a process of their own, on `tests.support.transformer_engine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.mcore.ddp.final_gradients import FinalGradients
from megatron.zerobubble.mcore.model.wgrad_split import driven_modules, split_weight_gradients
from megatron.zerobubble.wgrad.deferring import WgradKey
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Layers",
    "Transformer Engine's Linear and GroupedLinear in a backward pass outside of any B, in the store that runs their W",
    "works, bit for bit",
)

MICROBATCHES = 4
SPLITS = [3, 0, 5]
"""Tokens of each expert."""


@pytest.fixture(scope="module")
def engine(engine_wheel: None) -> Iterator[RankPool]:
    """One rank with Transformer Engine."""
    pool = RankPool(1, imports="tests.support.transformer_engine.rank_imports")
    yield pool
    pool.stop()


class Experts(nn.Module):
    """Two grouped linears, as a grouped MLP has, and one linear that returns its bias."""

    def __init__(self, *, delay: bool, fuse: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        how: dict[str, Any] = {"delay_wgrad_compute": delay, "fuse_wgrad_accumulation": fuse, "device": "cpu"}
        self.fc1 = te.GroupedLinear(len(SPLITS), 8, 12, bias=True, **how)
        self.fc2 = te.GroupedLinear(len(SPLITS), 12, 8, bias=False, **how)
        self.out = te.Linear(8, 8, bias=True, return_bias=True, **how)

    def forward(self, x: Tensor) -> Tensor:
        output, bias = self.out(self.fc2(torch.relu(self.fc1(x, SPLITS)), SPLITS))
        total: Tensor = output + bias
        return total


def _like_ddp(model: nn.Module, ready: list[str]) -> None:
    """`main_grad` and grad-ready hooks as megatron-core's DistributedDataParallel makes them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def hook(parameter: nn.Parameter) -> Callable[..., None]:
        def on_ready(*_: object) -> None:
            assert parameter.grad is not None, "DDP asserts this where it overlaps the reduction"
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            ready.append(names[id(parameter)])

        return on_ready

    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or parameter.numel() == 0:  # an absent bias
                continue
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.grad_added_to_main_grad = False
            if getattr(parameter, "skip_backward_post_hook", False):
                module.register_wgrad_accumulation_and_reduce_hooks(hook(parameter))
            else:
                parameter.register_post_accumulate_grad_hook(hook(parameter))


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(sum(SPLITS), 8, generator=generator) for _ in range(MICROBATCHES)]


def _expected(fuse: bool) -> dict[str, Tensor]:
    """Weights' gradients when each is computed in its backward."""
    torch.manual_seed(1)
    model = Experts(delay=False, fuse=fuse)
    _like_ddp(model, [])
    for x in _batches():
        model(x).square().sum().backward()
    return {name: parameter.main_grad for name, parameter in model.named_parameters()}


def _deferred(fuse: bool) -> tuple[Experts, WeightGradStore, list[str]]:
    torch.manual_seed(1)
    model, store = Experts(delay=True, fuse=fuse), WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate))
    names = split_weight_gradients(model, store)
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    ready: list[str] = []
    _like_ddp(model, ready)
    return model, store, ready


def _b(model: nn.Module, store: WeightGradStore, x: Tensor, microbatch: int, *, fused: bool = False) -> None:
    loss = model(x).square().sum()
    store.begin(0, microbatch, fused=fused)
    loss.backward()
    store.end()


def _assert_expected(model: Experts, fuse: bool) -> None:
    for name, gradient in _expected(fuse).items():
        assert torch.equal(model.get_parameter(name).main_grad, gradient), name


def _by_hand(_rank: int, fuse: bool) -> None:
    model, store, ready = _deferred(fuse)
    for microbatch, x in enumerate(_batches()):
        model(x).square().sum().backward()
        assert len(ready) == (microbatch + 1) * len(list(model.parameters()))
    store.check_empty()
    assert model.fc1.wgrad_store.context.empty()
    _assert_expected(model, fuse)


def _together(_rank: int, fuse: bool) -> None:
    model, store, ready = _deferred(fuse)
    for microbatch, x in enumerate(_batches()):
        _b(model, store, x, microbatch)
    early: list[str] = []

    @contextmanager
    def growing() -> Iterator[None]:
        before = len(ready)
        yield
        early.extend(ready[before:])

    keys = [WgradKey(0, microbatch) for microbatch in range(MICROBATCHES)]
    for part in range(MICROBATCHES):
        store.run_together(keys, part=part, growing=growing)
    store.check_empty()
    assert model.fc1.wgrad_store.context.empty()
    _assert_expected(model, fuse)
    names = Counter(name for name, _ in model.named_parameters())
    assert Counter(ready) - Counter(early) == names
    assert Counter(early) == Counter(dict.fromkeys(names, MICROBATCHES - 1))


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_ws_that_run_together_report_each_weight_finally_in_the_last_one_alone(engine: RankPool, fuse: bool) -> None:
    engine.run(_together, fuse)


def _before_their_w(_rank: int, fuse: bool) -> None:
    model, store, ready = _deferred(fuse)
    seen: list[int] = []
    first, *others = _batches()
    _b(model, store, first, 0)
    size = sum(weight.numel() for weight in model.fc2.parameters())
    assert store.run_ahead(size - 1) == 0
    x = first.clone().requires_grad_()
    y = x.sin()
    y.register_hook(lambda _: seen.append(store.run_ahead(size)))  # all modules have queued what nobody wants
    torch.autograd.grad(model(y).sum(), x)
    assert seen == [0]
    assert store.fill(2 * size) == (size if fuse else 0)  # the others have biases
    for microbatch, x in enumerate(others, start=1):
        _b(model, store, x, microbatch)
    assert [store.run_ahead(size), store.run_ahead(size)] == ([size, size] if fuse else [0, 0])
    assert ready == []
    for microbatch in range(MICROBATCHES):
        store.run(0, microbatch)
        assert Counter(ready) == Counter(name for name, _ in model.named_parameters())
        ready.clear()
    store.check_empty()
    assert model.fc2.wgrad_store.context.empty()
    _assert_expected(model, fuse)


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_a_module_that_ran_before_its_w_is_reported_in_it(engine: RankPool, fuse: bool) -> None:
    engine.run(_before_their_w, fuse)


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_a_backward_outside_of_any_b_computes_at_its_end(engine: RankPool, fuse: bool) -> None:
    engine.run(_by_hand, fuse)


def _in_b(_rank: int, fuse: bool, recomputes: bool) -> None:
    """`fc1` and `fc2` are declared to stay in B by the model around them, `out` is not."""
    torch.manual_seed(1)
    model, store = Experts(delay=True, fuse=fuse), WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate))
    model.wgrad_in_backward, model.out.wgrad_in_backward = True, False  # type: ignore[assignment]
    assert sorted(split_weight_gradients(model, store)) == ["out.bias", "out.weight"]
    ready: list[str] = []
    _like_ddp(model, ready)
    own = [name for name, _ in model.named_parameters() if not name.startswith("out")]
    for microbatch, x in enumerate(_batches()):
        output = checkpoint(model, x.requires_grad_(), use_reentrant=True) if recomputes else model(x)
        store.begin(0, microbatch, fused=False)
        output.square().sum().backward()
        store.end()
        assert sorted(ready) == sorted(own * (microbatch + 1))
    ready.clear()
    for microbatch in range(MICROBATCHES):
        store.run(0, microbatch)
    assert sorted(ready) == sorted(["out.bias", "out.weight"] * MICROBATCHES)
    store.check_empty()
    _assert_expected(model, fuse)


@pytest.mark.parametrize("recomputes", [False, True], ids=["once", "recomputed"])
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_a_module_that_is_declared_to_stay_in_b_computes_there(engine: RankPool, fuse: bool, recomputes: bool) -> None:
    engine.run(_in_b, fuse, recomputes)


def _wrong(_rank: int) -> None:
    model, store, _ = _deferred(False)
    first, second, *_ = _batches()
    _b(model, store, first, 0)
    _b(model, store, second, 1)
    with pytest.raises(WeightGradStoreError, match=r"chunk 0, microbatch 1: \w+ computes .* first in.*oldest is .*microbatch 0"):
        store.run(0, 1)
    model, store, _ = _deferred(False)
    del model.out.weight.main_grad
    _b(model, store, first, 0)
    with pytest.raises(WeightGradStoreError, match="out has a weight without main_grad"):
        store.run(0, 0)


def test_a_queue_that_w_would_misread_is_an_error(engine: RankPool) -> None:
    engine.run(_wrong)


class Layers(nn.Module):
    """A linear and experts; `read` has other readers."""

    def __init__(self, *, delay: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        how: dict[str, Any] = {"delay_wgrad_compute": delay, "fuse_wgrad_accumulation": False, "device": "cpu", "bias": False}
        self.first, self.read = te.Linear(8, 8, **how), te.Linear(8, 8, **how)
        self.experts = te.GroupedLinear(len(SPLITS), 8, 8, **how)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        if kind == "perturbed":  # by the gradient of a forward of its own, as adversarial training does
            x = x.requires_grad_()
            (gradient,) = torch.autograd.grad(self(x, ""), x)
            x = (x + 0.1 * gradient).detach()
        hidden = torch.relu(self.experts(self.first(x), SPLITS))
        output = hidden @ self.read.weight if kind == "absorbed" else self.read(hidden)
        loss: Tensor = output.square().sum()
        if kind == "penalty":
            loss = loss + self.read.weight.square().sum() + self.experts.weight1.square().sum()
        return loss


def _read_elsewhere(_rank: int, kind: str) -> None:
    torch.manual_seed(1)
    expected, actual = Layers(delay=False), Layers(delay=True)
    actual.load_state_dict(expected.state_dict())
    store = WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate))
    split_weight_gradients(actual, store)
    ready: list[str] = []
    _like_ddp(expected, [])
    _like_ddp(actual, ready)
    gradients = FinalGradients(actual, driven_modules(actual))
    for microbatch, x in enumerate(_batches()):
        expected(x, kind).backward()
        loss = actual(x, kind)
        store.begin(0, microbatch, fused=False)
        loss.backward()
        store.end()
    for microbatch in range(MICROBATCHES):
        if microbatch == MICROBATCHES - 1:
            ready.clear()
            gradients.begin_last()
        store.run(0, microbatch)
    gradients.end_last()
    gradients.finish()
    store.check_empty()
    assert sorted(ready) == ["experts.weight0", "experts.weight1", "experts.weight2", "first.weight", "read.weight"]
    assert all(each.wgrad_store.context.empty() for each in (actual.first, actual.read, actual.experts))
    for name, weight in expected.named_parameters():
        # the sums have other orders: per microbatch one rounding of a sum of two
        torch.testing.assert_close(actual.get_parameter(name).main_grad, weight.main_grad, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["penalty", "absorbed", "perturbed"])
def test_other_readers_of_a_weight_add_to_its_gradient(engine: RankPool, kind: str) -> None:
    engine.run(_read_elsewhere, kind)


def _asked_for(_rank: int) -> None:
    model, _, _ = _deferred(False)
    loss = model(_batches()[0]).square().sum()
    with pytest.raises(WeightGradStoreError, match=r"was asked for a weight of out, .*: set wgrad_in_backward"):
        torch.autograd.grad(loss, model.out.weight)


def test_the_gradient_of_a_deferred_weight_alone_is_refused(engine: RankPool) -> None:
    engine.run(_asked_for)
