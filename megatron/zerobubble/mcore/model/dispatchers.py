"""What megatron-core's token dispatchers hold from one microbatch to the next.

A dispatcher keeps tensors of its last F, or of the last recomputed one, until it runs again. Those with a graph keep more alive:
with recomputation the layer's input and its gradient, for every layer with experts, past the B and the W that the plan frees
them in. Nothing reads them after the pass that made them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["drop_graphs", "token_dispatchers"]


def token_dispatchers(chunk: nn.Module) -> list[Any]:
    """The objects of a chunk that hold what its experts dispatch; empty without experts."""
    dispatchers = [each.token_dispatcher for each in chunk.modules() if hasattr(each, "token_dispatcher")]
    managers = [each._comm_manager for each in dispatchers if hasattr(each, "_comm_manager")]  # of the flex dispatcher
    return [*dispatchers, *managers]


def drop_graphs(dispatchers: Iterable[Any]) -> None:
    """Drop the tensors that have a graph. Call it after every pass."""
    for dispatcher in dispatchers:
        for name, value in vars(dispatcher).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)
