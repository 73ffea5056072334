"""Rolling back a step: exactly, from a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.optimizer import rollback
from megatron.zerobubble.optimizer.rollback import Rollback

LR = 1e-2


class FusedAdamLike:
    """Adam as apex's and Transformer Engine's FusedAdam show themselves: one step count a group, the mode on the optimizer."""

    def __init__(self, parameters: list[Tensor], *, adam_w_mode: bool) -> None:
        self.adam_w_mode = adam_w_mode
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        group = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
        self.param_groups: list[dict[str, Any]] = [{"params": parameters, **group}]

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        group["step"] = group.get("step", 0) + 1
        b1, b2 = group["betas"]
        for parameter in group["params"]:
            assert parameter.grad is not None
            state = self.state.setdefault(
                parameter, {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            )
            decay = group["weight_decay"] * parameter
            gradient = parameter.grad if self.adam_w_mode else parameter.grad + decay
            state["exp_avg"].mul_(b1).add_((1 - b1) * gradient)
            state["exp_avg_sq"].mul_(b2).add_((1 - b2) * gradient**2)
            root = (state["exp_avg_sq"] / (1 - b2 ** group["step"])).sqrt() + group["eps"]
            update = state["exp_avg"] / (1 - b1 ** group["step"]) / root
            parameter.sub_(LR * (update + decay if self.adam_w_mode else update))


Make = Callable[[list[Tensor]], Any]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(torch.optim.AdamW, lr=LR, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=LR, weight_decay=0.1),
    "AdamW-betas": partial(torch.optim.AdamW, lr=LR, betas=(0.8, 0.95)),
    "FusedAdam": partial(FusedAdamLike, adam_w_mode=True),
    "FusedAdam-L2": partial(FusedAdamLike, adam_w_mode=False),
    "SGD": partial(torch.optim.SGD, lr=LR),
    "SGD-momentum": partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=0.1),
}


def weights() -> list[Tensor]:
    """Weights of two sizes; the last one never gets a gradient."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((300, 40), (40,), (7,))]


def give_gradients(parameters: list[Tensor], step: int, spike: float = 1.0) -> None:
    """New gradients. The first rows of the first weight get their first ones one by one, like an embedding's."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters[:2]:
        parameter.grad = spike * 1e-3 * torch.randn(parameter.shape, generator=generator)
    assert parameters[0].grad is not None
    parameters[0].grad[step : 2 * step + 8] = 0.0
    parameters[0].grad[-20:] = 0.0


def show(optimizer: Any) -> list[Any]:
    """Weights, state and counts, copied."""
    shown: list[Any] = []
    for group in optimizer.param_groups:
        shown.append(group.get("step"))
        for parameter in group["params"]:
            shown.append(parameter.detach().clone())
            state = optimizer.state.get(parameter, {})
            shown.append({name: value.clone() for name, value in state.items() if value is not None})
    return shown


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[name], b[name]) for name in a)
    return bool(a == b)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_before", [0, 1, 4])
@pytest.mark.parametrize("spike", [1.0, 1e6])
def test_a_rollback_restores_everything(name: str, num_before: int, spike: float) -> None:
    parameters = weights()
    optimizer = OPTIMIZERS[name](parameters[:2])
    for step in range(num_before):
        give_gradients(parameters, step)
        optimizer.step()
    before = show(optimizer)
    rollback = Rollback([optimizer])
    give_gradients(parameters, num_before, spike)
    rollback.snapshot()
    optimizer.step()
    assert not same(show(optimizer)[1], before[1])
    rollback.rollback()
    assert all(map(same, show(optimizer), before))


def test_pinned_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors stand for a GPU's and for pinned ones: they are not on the CPU. They have no numbers; other tests compare."""
    allocated: list[torch.Size] = []

    def pinned_like(tensor: Tensor) -> Tensor:
        allocated.append(tensor.shape)
        return torch.empty_like(tensor)

    monkeypatch.setattr(rollback, "_pinned_like", pinned_like)
    parameters = [torch.empty(size, device="meta", requires_grad=True) for size in (3, 4)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = FusedAdamLike(parameters, adam_w_mode=True)
    kept = Rollback([optimizer], on_host=True)
    counts = []
    for step in range(5):
        kept.snapshot()
        optimizer.step()
        if step % 2:
            kept.rollback()
        else:
            kept.drop_snapshot()
        counts.append(len(allocated))
    assert counts == [2, 6, 6, 6, 6], "the first step creates Adam's state; from the second on all buffers exist"
