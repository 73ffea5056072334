"""A weight whose gradient is computed in W instead of in autograd's backward pass, and what B leaves for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class SplitWeight:
    """One weight whose gradient is deferred, and the hooks around each of its Ws.

    Attributes:
        name: the parameter's name, for messages.
        weight: [out, in]. Its gradient goes into ``weight.main_grad`` if it has one (megatron-core's DDP gives it one), else
            into ``weight.grad``.
        hooks: called after each W of this weight; DDP registers its grad-ready hook here.
        before: called before each W of this weight, to provide the accumulator.
        position: its place in the order of the weights within one W; weights with the same position follow the order of B.
    """

    __slots__ = ("before", "hooks", "name", "position", "weight")

    def __init__(self, name: str, weight: torch.nn.Parameter) -> None:
        self.name = name
        self.weight = weight
        self.hooks: list[Callable[[], None]] = []
        self.before: list[Callable[[], None]] = []
        self.position = 0

    def prepare(self) -> None:
        """Call the `before` hooks: W is about to add to the accumulator."""
        for hook in self.before:
            hook()

    def accumulator(self) -> Tensor:
        """The tensor [out, in] that W adds to; created as zeros on first use where no DDP buffer exists."""
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is not None:
            return main_grad
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        return self.weight.grad

    def notify(self) -> None:
        """Call the grad-ready hooks: this weight's gradient of one microbatch is in ``main_grad``.

        DDP's hook is written for autograd: it expects a ``.grad``, and a flag that says it has been added already. The weight's
        own data stands in for that gradient: the right shape, and no allocation. Without a ``main_grad`` the gradient is in
        ``.grad`` itself, and stays.
        """
        if not self.hooks:
            return
        parameter = self.weight
        stands_in = getattr(parameter, "main_grad", None) is not None
        if stands_in:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            parameter.grad = parameter.data
        for hook in self.hooks:
            hook()
        if stands_in:
            parameter.grad = None


class DeferredGemm(NamedTuple):
    """One weight gradient that B has left for W: ``grad_output^T @ input``."""

    split: SplitWeight
    grad_output: Tensor
    """[tokens, out]."""
    input: Tensor
    """[tokens, in], or this rank's slice of the tokens."""
    gather_over: dist.ProcessGroup | None = None
    """If `input` is a slice: the group whose ranks hold the other slices."""
