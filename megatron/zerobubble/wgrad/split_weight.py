"""A weight whose gradient is computed in W instead of in autograd's backward pass, and what B leaves for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.wgrad.final import FinalGradient, ShareOfAutograd

logger = logging.getLogger(__name__)


class SplitWeight(FinalGradient):
    """One weight whose gradient is deferred, and the hooks behind each of its Ws.

    The weight may have other readers than its linear: the loss, a penalty, another layer. Autograd leaves their gradients in
    ``weight.grad``, and they are added to ``main_grad`` as soon as autograd has, as DDP's own hook would. So DDP is notified once
    its last W and every B of the chunk have run, and of a weight that had no W, too (`report`).

    Attributes:
        name: the parameter's name, for messages.
        weight: [out, in]. Its gradient goes into ``weight.main_grad`` if it has one (megatron-core's DDP gives it one), else
            into ``weight.grad``.
        hooks: called after each W of this weight; DDP registers its grad-ready hook here.
        is_due: whether its full backward runs, has computed its gradient, and has not reported it: it is reported as soon as
            autograd has come to its end for this weight.
    """

    __slots__ = ("_has_logged", "_share", "hooks", "is_due", "weight")

    def __init__(self, name: str, weight: torch.nn.Parameter) -> None:
        super().__init__(name)
        self.weight = weight
        self.hooks: list[Callable[[], None]] = []
        self.is_due = False
        self._has_logged = False
        self._share = ShareOfAutograd(weight, self)

    @property
    def weights(self) -> tuple[torch.nn.Parameter, ...]:
        """The weight."""
        return (self.weight,)

    def remove(self) -> None:
        """Leave the gradients of this weight to autograd again."""
        self._share.remove()

    @property
    def is_hooked(self) -> bool:
        """Whether a user's hook waits for the gradient where autograd accumulates it. B then computes it; logged once."""
        if not has_hooks(self.weight):
            return False
        if not self._has_logged:
            self._has_logged = True
            logger.warning(
                "%s has a hook on its gradient: B computes it, as long as there is a hook, and W has less to do", self.name
            )
        return True

    def accumulator(self) -> Tensor:
        """The tensor [out, in] that W adds to; created as zeros on first use where no DDP buffer exists."""
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is not None:
            return main_grad
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        return self.weight.grad

    def backward_ended(self) -> None:
        """Notify DDP if that waits for the end of the backward pass."""
        if self.is_due:
            self.is_due = False
            self.notify()

    def notify(self) -> None:
        """Call the grad-ready hooks: this weight's gradient of one microbatch is in ``main_grad``.

        DDP's hook is written for autograd: it expects a ``.grad``, and a flag that says it has been added already. The weight's
        own data stands in for that gradient: the right shape, and no allocation. Without a ``main_grad`` the gradient is in
        ``.grad`` itself, and stays.
        """
        if self.hooks and not self.waits_for_end:
            self._call_hooks()

    def report(self) -> None:
        """Notify DDP of the final gradient, if no W has. A frozen weight has none."""
        if self.hooks and not self.is_reported and self.weight.requires_grad:
            self.is_final = True
            self._call_hooks()

    def _call_hooks(self) -> None:
        parameter = self.weight
        stands_in = getattr(parameter, "main_grad", None) is not None
        if stands_in:
            was_added = getattr(parameter, "grad_added_to_main_grad", False)
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            parameter.grad = parameter.data
        for hook in self.hooks:
            hook()
        if stands_in:
            parameter.grad = None
            parameter.grad_added_to_main_grad = was_added  # type: ignore[attr-defined]
        self.is_reported = self.is_final


def has_hooks(weight: torch.nn.Parameter) -> bool:
    """Whether somebody has called the weight's `register_hook` or `register_post_accumulate_grad_hook`."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


class DeferredGemm(NamedTuple):
    """One weight gradient that B has left for W: ``grad_output^T @ input``."""

    split: SplitWeight
    grad_output: Tensor
    """[tokens, out]."""
    input: Tensor
    """[tokens, in], or this rank's slice of the tokens."""
    gather_over: dist.ProcessGroup | None = None
    """If `input` is a slice: the group whose ranks hold the other slices."""
