"""Modules that keep back their weight gradients themselves: Transformer Engine's contract, driven by our W.

With `delay_wgrad_compute` a Transformer Engine module (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear; from 2.3 on) leaves
what its weight gradients need in a queue of its own during backward. `backward_dw()` computes those of the oldest entry and then
calls the hooks that `register_wgrad_accumulation_and_reduce_hooks` was given. The queue knows no microbatches. So the store only
remembers *that* a module has something to do for a (chunk, microbatch), checks that Ws come in the order of their Bs, and calls.
Precision is the module's own business: fp8 operands stay in its queue as they are.

There are two ways to add a gradient. Without fused accumulation `backward_dw` sets ``weight.grad``, and DDP's hook adds it to
``main_grad``. With it the GEMM adds to ``main_grad``; backward has set ``grad_added_to_main_grad`` and returned a placeholder as
gradient, for DDP's hook to find. That placeholder comes with each B, and the first W's hook takes it away: with several
microbatches between B and W autograd would add placeholders to each other, and later Ws would find none. So it is dropped after
each B, and the weight's own data stands in for it during W, as in `SplitWeight.notify`.

A bias that is added outside of the module has its gradient in B, from autograd, and its hook in W; a second B before that would
add to it. So gradients that are there after a B wait here, and are put back for their own W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from megatron.zerobubble.errors import WeightGradStoreError

__all__ = ["DeferringModule"]


class DeferringModule:
    """One module with a queue of its own, and the (chunk, microbatch) pairs that are in it.

    Args:
        name: the module's, for messages.
        backward_dw: computes the weight gradients of the oldest entry and calls the hooks.
        weights: its parameters whose gradients come late. Each needs a ``main_grad``, which megatron-core's DDP gives it.
    """

    __slots__ = ("_backward_dw", "_early", "_waiting", "_weights", "name")

    def __init__(self, name: str, backward_dw: Callable[[], object], weights: Sequence[Parameter]) -> None:
        self.name = name
        self._backward_dw = backward_dw
        self._weights = tuple(weights)
        self._waiting: deque[tuple[int, int]] = deque()
        self._early: dict[tuple[int, int], list[tuple[Parameter, Tensor]]] = {}

    def note(self, key: tuple[int, int]) -> None:
        """The module's backward runs in the B of this (chunk, microbatch)."""
        self._waiting.append(key)

    def after_backward(self, key: tuple[int, int]) -> None:
        """The B of this (chunk, microbatch) is over: drop placeholders, put real gradients aside. Their hooks run in W."""
        for weight in self._weights:
            if weight.grad is not None:
                if not _is_fused(weight):
                    self._early.setdefault(key, []).append((weight, weight.grad))
                weight.grad = None

    def compute(self, key: tuple[int, int]) -> None:
        """W of this (chunk, microbatch), once for each time it was noted.

        Raises:
            WeightGradStoreError: it is not the oldest in the queue, or a weight has no ``main_grad``.
        """
        oldest = self._waiting.popleft() if self._waiting else None
        if oldest != key:
            raise WeightGradStoreError(
                f"chunk {key[0]}, microbatch {key[1]}: {self.name} computes weight gradients first in, first out, and its "
                f"oldest is {'none' if oldest is None else f'chunk {oldest[0]}, microbatch {oldest[1]}'}. The plan's Ws do not "
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
    """Whether the GEMM adds to ``main_grad``. A weight with `zero_out_wgrad` has a placeholder that counts, and keeps it."""
    return getattr(weight, "grad_added_to_main_grad", False) and not getattr(weight, "zero_out_wgrad", False)
