"""Modules that defer their weight gradients themselves (Transformer Engine's `delay_wgrad_compute`), run by our W.

With `delay_wgrad_compute` a Transformer Engine module (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear; from 2.8 on) saves
the operands of its weight gradients in a queue of its own during backward. `backward_dw()` computes the gradients of the oldest
entry and then calls the hooks registered with `register_wgrad_accumulation_and_reduce_hooks`. The entries are not labeled with
microbatches. So the store only records *that* a module has an entry for a (chunk, microbatch), checks that Ws come in the order
of their Bs, and calls `backward_dw`. Precision is up to the module: fp8 operands stay in its queue as they are.

There are two ways to accumulate a gradient. Without fused accumulation `backward_dw` sets ``weight.grad``, and DDP's hook adds it
to ``main_grad``. With it the GEMM adds to ``main_grad``; backward has set ``grad_added_to_main_grad`` and returned a placeholder
as gradient, for DDP's hook to find. Each B returns such a placeholder, and the first W's hook removes it: with several
microbatches between B and W autograd would add placeholders to each other, and later Ws would find none. So it is dropped after
each B, and the weight's own data stands in for it during W, as in `SplitWeight.notify`.

A bias that is added outside of the module gets its gradient in B, from autograd, and its hook in W; a second B before that would
add to the gradient. So gradients that exist after a B are put aside here, and restored for their own W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from megatron.zerobubble.errors import WeightGradStoreError

__all__ = ["DeferringModule"]


class WgradKey(NamedTuple):
    """Which B and W of a rank."""

    chunk: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        return self.where.replace(",", "")

    @property
    def where(self) -> str:
        """The same with commas."""
        part = f", slice {self.slice}" if self.slice else ""
        return f"chunk {self.chunk}, microbatch {self.microbatch}{part}"


OUTSIDE = WgradKey(-1, -1)
"""A backward pass whose weight gradients are computed at its end, not in a W."""


class DeferringModule:
    """One module with a wgrad queue of its own, and the (chunk, microbatch) pairs in that queue.

    Args:
        name: name of the module, for messages.
        backward_dw: computes the weight gradients of the oldest entry and calls the hooks.
        weights: parameters of the module with deferred gradients. Each needs a ``main_grad``, as set by megatron-core's DDP.
    """

    __slots__ = ("_backward_dw", "_early", "_waiting", "_weights", "name")

    def __init__(self, name: str, backward_dw: Callable[[], object], weights: Sequence[Parameter]) -> None:
        self.name = name
        self._backward_dw = backward_dw
        self._weights = tuple(weights)
        self._waiting: deque[WgradKey] = deque()
        self._early: dict[WgradKey, list[tuple[Parameter, Tensor]]] = {}

    @property
    def is_frozen(self) -> bool:
        """Whether none of the weights is trained now: a forward then leaves nothing in the queue."""
        return not any(weight.requires_grad for weight in self._weights)

    def note(self, key: WgradKey) -> None:
        """Record that the module's backward runs in the B of this (chunk, microbatch)."""
        self._waiting.append(key)

    def compute_after_backward(self) -> None:
        """Compute the weight gradients at the end of the backward pass that runs now, in no W. Called when the module's runs."""
        self.note(OUTSIDE)
        Variable._execution_engine.queue_callback(self._compute_outside)

    def _compute_outside(self) -> None:
        self.after_backward(OUTSIDE)
        self.compute(OUTSIDE)

    def after_backward(self, key: WgradKey) -> None:
        """End the B of this (chunk, microbatch): drop placeholders, put real gradients aside. Their hooks run in W."""
        for weight in self._weights:
            if weight.grad is not None:
                if not _is_fused(weight):
                    self._early.setdefault(key, []).append((weight, weight.grad))
                weight.grad = None

    def compute(self, key: WgradKey) -> None:
        """Compute W of this (chunk, microbatch); call it as often as `note`.

        Raises:
            WeightGradStoreError: this pair is not the oldest in the queue, or a weight has no ``main_grad``.
        """
        oldest = self._waiting.popleft() if self._waiting else None
        if oldest != key:
            raise WeightGradStoreError(
                f"{key.where}: {self.name} computes weight gradients first in, first out, and its "
                f"oldest is {'none' if oldest is None else oldest.where}. The plan's Ws do not "
                "come in the order of its Bs, or an earlier iteration failed between them"
            )
        for weight, gradient in self._early.pop(key, ()):
            weight.grad = gradient
        stand_ins = []
        for weight in self._weights:
            if getattr(weight, "main_grad", None) is None:
                raise WeightGradStoreError(
                    f"{self.name} has a weight without main_grad, and would overwrite the gradient of one microbatch with the "
                    "next one's: wrap the model in megatron-core's DistributedDataParallel"
                )
            if _is_fused(weight):
                weight.grad = weight.data
                stand_ins.append(weight)
        self._backward_dw()
        for weight in stand_ins:
            weight.grad = None


def _is_fused(weight: Parameter) -> bool:
    """Whether the GEMM adds to ``main_grad``. A weight with `zero_out_wgrad` needs its placeholder, and keeps it."""
    return getattr(weight, "grad_added_to_main_grad", False) and not getattr(weight, "zero_out_wgrad", False)
