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
add to the gradient. So gradients that exist after a B are put aside here, and restored for their own W. What autograd computes of
weights that somebody else reads is added to ``main_grad`` at once: `backward_dw` would replace it.

A backward pass by `torch.autograd.grad`, for activations, queues an entry, too, whose gradient nobody wants: it is dropped.

Where a CUDA graph has the weight gradients of several modules (`replay`), no module fills its queue: it only calls its hooks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from megatron.zerobubble.errors import WeightGradStoreError
from megatron.zerobubble.wgrad.final import FinalGradient, ShareOfAutograd, Taker, accumulator_of, taker_of

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


_OUTSIDE = WgradKey(-1, -1)
"""A backward pass outside of any B, whose weight gradients are computed at its end."""


class DeferringModule(FinalGradient):
    """One module with a wgrad queue of its own, and the (chunk, microbatch) pairs in that queue.

    Args:
        name: name of the module, for messages.
        module: has Transformer Engine's `backward_dw`, which computes the weight gradients of the oldest entry and calls the
            hooks, `wgrad_accumulation_and_reduce_hooks` and `wgrad_store`. In B it gives autograd nothing or zeros for them.
        weights: parameters of the module with deferred gradients. Each needs a ``main_grad``, as set by megatron-core's DDP.

    Attributes:
        replay: computes the weight gradients of a W with those of other modules, unless it returns False; None: `backward_dw`
            does.
        num_elements: elements of the weights.
    """

    __slots__ = (
        "_early",
        "_module",
        "_node",
        "_num_ahead",
        "_shares",
        "_unwanted",
        "_waiting",
        "_weights",
        "num_elements",
        "replay",
    )

    def __init__(self, name: str, module: Any, weights: Sequence[Parameter]) -> None:
        super().__init__(name)
        self._module = weakref.ref(module)
        self.replay: Callable[[WgradKey], bool] | None = None
        self._weights = tuple(weights)
        self.num_elements = sum(weight.numel() for weight in weights)
        self._node = accumulator_of(self._weights[0])
        self._shares = [ShareOfAutograd(each, self) for each in weights if each.dim() > 1 and not _needs_placeholder(each)]
        self._unwanted: list[int] | None = None
        """Entries in the module's queues before a backward pass whose entries nobody wants."""
        self._waiting: deque[WgradKey] = deque()
        self._num_ahead = 0
        """How many of the oldest entries were computed before their W."""
        self._early: dict[WgradKey, list[tuple[Parameter, Tensor]]] = {}

    @property
    def weights(self) -> tuple[Parameter, ...]:
        """The parameters with deferred gradients."""
        return self._weights

    def is_of(self, modules: Container[int]) -> bool:
        """Whether the module is one of these, by identity."""
        return id(self._module()) in modules

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Inside, the module has no hooks."""
        kept = [(hooks, list(hooks)) for hooks in self._hook_lists]
        for hooks, _ in kept:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, before in kept:
                hooks[:] = before

    @property
    def _hooks(self) -> list[Callable[[], object]]:
        """What the module calls behind its weight gradients."""
        return [hook for hooks in self._hook_lists for hook in hooks]

    @property
    def _hook_lists(self) -> list[list[Callable[[], object]]]:
        """The lists that have the hooks, in the order in which they are called."""
        return [getattr(self._module(), "wgrad_accumulation_and_reduce_hooks", [])]

    def remove(self) -> None:
        """Leave the gradients of the weights to autograd again."""
        for share in self._shares:
            share.remove()

    @property
    def is_wanted(self) -> bool:
        """Whether the backward pass that runs now accumulates into the weights.

        Raises:
            WeightGradStoreError: `torch.autograd.grad` was given one of the weights.
        """
        taker = taker_of(self._node)
        if taker is Taker.AUTOGRAD:
            raise WeightGradStoreError(
                f"torch.autograd.grad was asked for a weight of {self.name}, which defers its weight gradients and returns none: "
                "set wgrad_in_backward = True on the module before it is wrapped, or leave this weight out"
            )
        return taker is Taker.DEFERRED

    def forget(self) -> None:
        """Note that the entries of the backward pass that runs now are unwanted; `drop` removes them at its end."""
        if self._unwanted is None:
            self._unwanted = [len(queue) for queue in self._queues]

    def drop(self) -> None:
        """Remove the entries that were queued since `forget`."""
        for queue, wanted in zip(self._queues, self._unwanted or (), strict=False):
            while len(queue) > wanted:
                queue.pop()
        self._unwanted = None

    @property
    def _queues(self) -> list[Any]:
        """The entries of the module's own queues, the oldest first."""
        entries = getattr(getattr(getattr(self._module(), "wgrad_store", None), "context", None), "queue", None)
        if entries is None:
            raise WeightGradStoreError(
                f"torch.autograd.grad or backward(inputs=) reached {self.name}, whose queue of weight gradients is not known: "
                "set wgrad_in_backward = True on the module before it is wrapped"
            )
        return [entries]

    def report(self) -> None:
        """Notify DDP of the final gradients, if no W has: the weights were read by others alone in the last microbatch."""
        module = self._module()
        if self.is_reported or self.is_frozen or module is None:
            return
        with _standing_in(self._weights):
            for hook in self._hooks:
                hook()
        self.is_reported = True

    @property
    def is_frozen(self) -> bool:
        """Whether none of the weights is trained now: a forward then leaves nothing in the queue."""
        return not any(weight.requires_grad for weight in self._weights)

    def note(self, key: WgradKey) -> None:
        """Record that the module's backward runs in the B of this (chunk, microbatch)."""
        self._waiting.append(key)

    def compute_after_backward(self) -> None:
        """Compute the weight gradients at the end of the backward pass that runs now, in no W. Called when the module's runs."""
        self.note(_OUTSIDE)
        Variable._execution_engine.queue_callback(self._compute_outside)

    def _compute_outside(self) -> None:
        self.after_backward(_OUTSIDE)
        self.compute(_OUTSIDE)

    def after_backward(self, key: WgradKey) -> None:
        """End the B of this (chunk, microbatch): drop placeholders, put real gradients aside. Their hooks run in W."""
        for weight in self._weights:
            if weight.grad is not None:
                if not _is_fused(weight):
                    self._early.setdefault(key, []).append((weight, weight.grad))
                weight.grad = None

    def compute_ahead(self, key: WgradKey) -> bool:
        """Compute the GEMMs of this W before it, which then only calls the hooks.

        Only where they add to ``main_grad``, to which autograd then adds nothing: elsewhere a hook adds in W. Not between
        `forget` and `drop`, which count the entries.

        Returns:
            Whether they were computed.
        """
        is_next = len(self._waiting) > self._num_ahead and self._waiting[self._num_ahead] == key
        if not is_next or self._unwanted is not None or self.replay is not None:
            return False
        module = self._module()
        if module is None or not all(map(_is_fused, self._weights)):
            return False
        with self.without_hooks():
            module.backward_dw()
        self._num_ahead += 1
        return True

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
        module = self._module()
        assert module is not None, "its forward hook, and so this, is gone with it"
        if self._num_ahead or (self.replay is not None and self.replay(key)):
            self._num_ahead = max(0, self._num_ahead - 1)
            for hook in self._hooks:
                hook()
        else:
            module.backward_dw()
        for weight in stand_ins:
            weight.grad = None
        self.is_reported = self.is_final


@contextmanager
def _standing_in(weights: Sequence[Parameter]) -> Iterator[None]:
    """Inside, each weight's own data stands in for a gradient that is in ``main_grad``, as in `SplitWeight.notify`."""
    flags = [getattr(weight, "grad_added_to_main_grad", False) for weight in weights]
    for weight in weights:
        weight.grad, weight.grad_added_to_main_grad = weight.data, True  # type: ignore[attr-defined]
    yield
    for weight, flag in zip(weights, flags, strict=True):
        weight.grad, weight.grad_added_to_main_grad = None, flag  # type: ignore[attr-defined]


def _is_fused(weight: Parameter) -> bool:
    """Whether the GEMM adds to ``main_grad``. A weight with `zero_out_wgrad` needs its placeholder, and keeps it."""
    return getattr(weight, "grad_added_to_main_grad", False) and not _needs_placeholder(weight)


def _needs_placeholder(weight: Parameter) -> bool:
    return getattr(weight, "zero_out_wgrad", False)
