"""When DDP is notified of the gradients of a chunk, one weight at a time: no model, a DDP of names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.mcore.ddp.final_gradients import FinalGradients
from megatron.zerobubble.wgrad.split_weight import SplitWeight


class Wrapped:
    """Stands for DDP: it lists what is reported outside of `no_sync`, and reduces a bucket of its own for each weight."""

    def __init__(self, *names: str) -> None:
        self.final: list[str] = []
        self.in_flight: set[str] = set()
        self._may_grow = False
        self.splits = [self._split(name) for name in names]
        self.param_to_bucket_group = {split.weight: _Group(self, split.name) for split in self.splits}

    def _split(self, name: str) -> SplitWeight:
        weight: Any = nn.Parameter(torch.ones(2, 3))
        weight.main_grad = torch.zeros(2, 3)
        split = SplitWeight(name, weight)

        def hook() -> None:
            assert weight.grad is not None
            if not self._may_grow:
                self.final.append(name)

        split.hooks.append(hook)
        return split

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients may still grow."""
        self._may_grow = True
        yield
        self._may_grow = False


class _Group:
    def __init__(self, ddp: Wrapped, name: str) -> None:
        self._ddp, self._name = ddp, name

    @property
    def grad_reduce_handle(self) -> object | None:
        return object() if self._name in self._ddp.in_flight else None


def _read(split: SplitWeight) -> None:
    """A backward pass of something else than the weight's linear."""
    (split.weight * 2.0).sum().backward()


def _last_w(gradients: FinalGradients, split: SplitWeight) -> None:
    gradients.begin_last()
    split.notify()
    gradients.end_last()


def test_a_weight_without_a_w_is_reported_behind_the_last_one() -> None:
    ddp = Wrapped("in W", "read", "frozen")
    in_w, read, frozen = ddp.splits
    frozen.weight.requires_grad_(False)
    gradients = FinalGradients(ddp, ddp.splits)  # type: ignore[arg-type]
    _read(read)
    in_w.notify()  # W of an earlier microbatch
    gradients.begin_last()
    in_w.notify()
    assert ddp.final == ["in W"]
    gradients.end_last()
    gradients.finish()
    assert ddp.final == ["in W", "read"]
    assert read.weight.main_grad.eq(2.0).all()  # type: ignore[attr-defined]
    assert all(split.weight.grad is None for split in ddp.splits)


def test_a_weight_that_is_read_later_than_its_last_w_waits_for_the_end_from_the_next_iteration_on() -> None:
    ddp = Wrapped("late")
    (late,) = ddp.splits
    for iteration in range(2):
        gradients = FinalGradients(ddp, ddp.splits)  # type: ignore[arg-type]
        _last_w(gradients, late)
        assert ddp.final == (["late"] if iteration == 0 else [])
        _read(late)  # B of another chunk
        gradients.finish()
        assert ddp.final == ["late"]
        ddp.final.clear()
    assert late.weight.main_grad.eq(4.0).all()  # type: ignore[attr-defined]


def test_a_gradient_that_its_bucket_missed_is_an_error() -> None:
    ddp = Wrapped("late")
    (late,) = ddp.splits
    gradients = FinalGradients(ddp, ddp.splits)  # type: ignore[arg-type]
    _last_w(gradients, late)
    ddp.in_flight.add("late")
    _read(late)
    with pytest.raises(WeightGradStoreError, match=r"^late got a gradient from another chunk .* turn overlap_grad_reduce off$"):
        gradients.finish()


def test_an_iteration_that_ended_early_leaves_nothing_to_the_next() -> None:
    ddp = Wrapped("weight")
    (split,) = ddp.splits
    for _ in range(2):
        gradients = FinalGradients(ddp, ddp.splits)  # type: ignore[arg-type]
        _read(split)
        gradients.begin_last()
        split.notify()
        ddp.in_flight.add("weight")
    gradients.end_last()
    gradients.finish()
    assert not split.waits_for_end


def test_a_gradient_that_is_left_in_grad_is_an_error() -> None:
    ddp = Wrapped("assigned")
    (assigned,) = ddp.splits
    gradients = FinalGradients(ddp, ddp.splits)  # type: ignore[arg-type]
    _last_w(gradients, assigned)
    assigned.weight.grad = torch.ones(2, 3)
    with pytest.raises(WeightGradStoreError, match=r"^assigned: the iteration ended with a gradient in \.grad that is not in"):
        gradients.finish()


def test_gradients_are_left_to_autograd_again() -> None:
    (split,) = Wrapped("weight").splits
    split.remove()
    _read(split)
    assert split.weight.grad is not None
    assert not split.weight.main_grad.any()  # type: ignore[attr-defined]
