"""MLPs whose linears Transformer Engine's op fuser runs (`use_transformer_engine_op_fuser`).

megatron-core keeps the linears, which have the parameters and DDP's hooks, and calls an `ops.Sequential` in their place. The
first forward makes it, and it is no submodule: hooks on the linears would never run, and queues of weight gradients are the
operations' own. So such an MLP defers as one unit. A hook on its operations leaves it to the store, and W calls its
`backward_dw`, which computes the oldest weight gradients of both operations and then calls DDP's hooks on the linears.

Experts (`TEGroupedMLP`, from megatron-core 0.18 and Transformer Engine 2.15 on) build operations that defer, shared experts
(`FusedSharedExpertMLP`, 0.19) such that do not, although their `backward_dw` asks them: these get queues where they are made. A
fused dense MLP (`TEFusedMLP`) has no operation that could defer, and keeps its weight gradients in B, as all do before 2.15. See
ADR 67.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.utils import is_te_min_version
from torch import Tensor, nn

from megatron.zerobubble.mcore.model.transformer_engine import FUSED_LINEARS, FUSED_OPERATIONS, fused_operations, is_fused
from megatron.zerobubble.wgrad.deferring import DeferringModule

__all__ = ["FusedLinears", "FusedOperations", "fused_linears", "keeps_fused_in_b", "parameters_of"]


_OLDEST = "2.15.0"
"""Transformer Engine's first release whose operations can defer weight gradients."""


def keeps_fused_in_b(module: nn.Module) -> bool:
    """Whether fused operations run the linears of a module, and can compute their weight gradients in backward only."""
    if is_fused(module):
        return not is_te_min_version(_OLDEST)
    return hasattr(module, "_make_fused_impl") and all(hasattr(module, name) for name in FUSED_LINEARS)


def parameters_of(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """Parameters by name of the module itself, without its submodules; of a unit those of its linears."""
    if not is_fused(module):
        return module._parameters
    return {f"{name}.{key}": each for name in FUSED_LINEARS for key, each in getattr(module, name)._parameters.items()}


def fused_linears(chunk: nn.Module) -> set[int]:
    """ids of the linears of a chunk's units."""
    return {id(getattr(module, name)) for module in chunk.modules() if is_fused(module) for name in FUSED_LINEARS}


class FusedLinears(DeferringModule):
    """A unit with the queues of its operations and the hooks of its linears, in the order in which they are called."""

    __slots__ = ()

    @property
    def _hook_lists(self) -> list[list[Callable[[], object]]]:
        module = self._module()
        linears = () if module is None else [getattr(module, name) for name in reversed(FUSED_LINEARS)]
        return [linear.wgrad_accumulation_and_reduce_hooks for linear in linears]

    @property
    def _queues(self) -> list[Any]:
        module = self._module()
        made = () if module is None else fused_operations(module)
        return [each.wgrad_store.context.queue for each in made if hasattr(each, "wgrad_store")]


class FusedOperations:
    """Makes the operations of a unit where it does, such that they defer, with a hook on them.

    Args:
        module: the unit. Operations that it has made are made again.
        hook: a forward hook.
        own: what the operations get in the place of their input, which W reads; None: the input.
    """

    def __init__(self, module: nn.Module, hook: Callable[..., None], own: Callable[[Tensor], Tensor] | None) -> None:
        self._module = weakref.ref(module)  # which has this as an attribute
        self._hook = hook
        self._own = own
        self._attribute, self._method = next((name, by) for name, by in FUSED_OPERATIONS.items() if hasattr(module, by))
        setattr(module, self._method, self)
        setattr(module, self._attribute, None)

    def __call__(self) -> Any:
        """The operations, as an `ops.Sequential`."""
        module = self._module()
        made = getattr(type(module), self._method)(module)
        for each in made.children():
            store = getattr(each, "wgrad_store", None)
            if store is not None and not store.delay_wgrad_compute():
                each.wgrad_store = type(store)(True)
        own = self._own
        if own is not None:
            made.register_forward_pre_hook(lambda _, args: (own(args[0]), *args[1:]))
        made.register_forward_hook(self._hook)
        return made

    def remove(self) -> None:
        """Let the unit make its operations by itself, the next time it needs them."""
        module = self._module()
        vars(module).pop(self._method)
        setattr(module, self._attribute, None)
