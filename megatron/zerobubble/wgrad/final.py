"""What the split has to know of a weight to notify DDP once its gradient is final, and what autograd adds to such a weight."""

from __future__ import annotations

import abc
import enum
import weakref
from functools import partial
from typing import Any

import torch

__all__ = ["FinalGradient", "ShareOfAutograd", "Taker", "accumulator_of", "taker_of"]


class FinalGradient(abc.ABC):
    """Whether DDP was notified of the final gradient of one or several weights in this iteration.

    Attributes:
        name: of the weight or of its module, for messages.
        position: its place in the order of the weights within one W; those with the same position follow the order of B.
        is_final: whether what is reported now is final.
        is_reported: whether the final gradient was reported.
        was_late: whether autograd added to it after that.
        has_share: whether autograd has added to it so far, in any iteration: the weight has other readers than its linear.
        waits_for_end: the same of any iteration so far. From the next one on it is reported at the end of the iteration.
    """

    __slots__ = ("__weakref__", "has_share", "is_final", "is_reported", "name", "position", "waits_for_end", "was_late")

    def __init__(self, name: str) -> None:
        self.name = name
        self.position = 0
        self.waits_for_end = self.has_share = False
        self.end()

    def end(self) -> None:
        """End an iteration: gradients of the next one may grow."""
        self.is_final = self.is_reported = self.was_late = False

    @property
    @abc.abstractmethod
    def weights(self) -> tuple[torch.nn.Parameter, ...]:
        """The weights."""

    @abc.abstractmethod
    def report(self) -> None:
        """Notify DDP of the final gradient, if no W has. A frozen weight has none."""

    def backward_ended(self) -> None:
        """Autograd has come to the end of a backward pass for these weights: nothing in it adds to them any more."""
        return

    def note_share(self) -> None:
        """Autograd has added to the gradient."""
        self.has_share = True
        if self.is_reported:
            self.was_late = self.waits_for_end = True


class ShareOfAutograd:
    """Adds what autograd leaves in the ``.grad`` of a weight with deferred gradients to its ``main_grad``, after each backward.

    Args:
        weight: of any shape.
        owner: is notified; not kept alive.
    """

    __slots__ = ("__weakref__", "_handle", "_node", "_owner", "weight")

    def __init__(self, weight: torch.nn.Parameter, owner: FinalGradient) -> None:
        self.weight = weight
        self._owner = weakref.ref(owner)
        self._node = accumulator_of(weight)  # exists, with its hooks, as long as somebody holds it
        # Where DDP hooks it: behind the hooks of users, who find in `.grad` what they find without the split.
        self._handle = self._node.register_hook(partial(_add, weakref.ref(self)))

    def remove(self) -> None:
        """Leave ``.grad`` alone."""
        self._handle.remove()

    @torch.no_grad()
    def add(self) -> None:
        """Move ``.grad`` to ``main_grad``, if both exist. A fused GEMM that has added there itself says so by DDP's flag."""
        parameter = self.weight
        main_grad = getattr(parameter, "main_grad", None)
        if parameter.grad is None or main_grad is None:
            return
        if not getattr(parameter, "grad_added_to_main_grad", False):
            main_grad.add_(parameter.grad)
        parameter.grad = None
        owner = self._owner()
        if owner is not None:
            owner.note_share()


def accumulator_of(weight: torch.nn.Parameter) -> Any:
    """The node by which autograd accumulates into ``weight.grad``, reached through a view."""
    with torch.enable_grad():
        view: Any = weight.view_as(weight)
    return view.grad_fn.next_functions[0][0]


def _add(share: weakref.ref[ShareOfAutograd], *_: object) -> None:
    alive = share()
    if alive is not None:
        alive.add()
        owner = alive._owner()
        if owner is not None:
            owner.backward_ended()


class Taker(enum.Enum):
    """Who takes the gradient of a weight that a backward pass reaches."""

    DEFERRED = enum.auto()
    AUTOGRAD = enum.auto()
    NOBODY = enum.auto()


def taker_of(node: Any) -> Taker:
    """Who takes the gradient of a weight in the backward pass that runs now.

    `backward()` accumulates into the weight, and a W may do that later. `torch.autograd.grad` and `backward(inputs=...)` for
    other tensors do not reach it. Where `grad` was given the weight itself, its caller takes the gradient.

    Args:
        node: autograd's node for the weight.
    """
    try:
        return Taker.DEFERRED if torch._C._will_engine_execute_node(node) else Taker.NOBODY
    except RuntimeError as error:
        if "autograd.grad" not in str(error):  # torch refuses to answer where `autograd.grad` was given this weight
            raise
        return Taker.AUTOGRAD
