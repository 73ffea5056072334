"""Rerunning forwards: the same microbatches, the same random numbers, and nothing counted twice.

Besides activations, a forward changes the buffers of its modules (a router's number of tokens per expert), the scales of FP8 with
delayed scaling, and what megatron-core collects for logging (auxiliary losses of routers, MTP losses). All are restored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random as mcore_random
from torch import Tensor, nn

from megatron.zerobubble.mcore.compat import mtp_entries, router_loss_sums
from megatron.zerobubble.mcore.model.transformer_engine import forget_scales_for_recomputation, scaling_tensors

__all__ = ["Replayed", "Rewind"]


class Replayed:
    """An iterator over microbatches that can be rewound once to its first item."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._seen: list[Any] | None = []
        self._again: deque[Any] = deque()

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Any:
        if self._again:
            return self._again.popleft()
        item = next(self._iterator)
        if self._seen is not None:
            self._seen.append(item)
        return item

    def rewind(self) -> None:
        """Restart from the first item; items are no longer kept from here on."""
        self._again.extend(self._seen or ())
        self._seen = None

    def release(self) -> None:
        """Stop keeping items: the iterator will not be rewound."""
        self._seen = None


class Rewind:
    """A rank's state at the start of an iteration: data iterators, megatron-core's RNG states, and what forwards write.

    Args:
        iterators: per chunk a `Replayed` iterator, or None for a chunk that reads no data.
        chunks: this rank's model chunks.
    """

    def __init__(self, iterators: Sequence[Any], chunks: Sequence[nn.Module]) -> None:
        self._iterators = [iterator for iterator in iterators if iterator is not None]
        self._random_states = mcore_random._get_all_rng_states()
        buffers = (buffer for chunk in chunks for _, buffer in chunk.named_buffers())
        self._written = [(tensor, tensor.clone()) for tensor in (*buffers, *_logged())]
        self._scaling = [(tensor, tensor.clone()) for tensor in scaling_tensors(chunks)]
        self._before_step: list[Tensor] = []

    def before_step(self) -> None:
        """The step before the forwards may be done again: what it writes is kept by `rewind`.

        With weights in FP8 and delayed scaling that is their magnitude, which is written where forwards write those of inputs.
        """
        self._before_step = [tensor.clone() for tensor, _ in self._scaling]

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the state, in place, so that the forwards can be rerun."""
        mcore_random._set_all_rng_states(*self._random_states)
        forget_scales_for_recomputation()
        for tensor, copy in self._written:
            tensor.copy_(copy)
        for (tensor, copy), before in zip(self._scaling, self._before_step, strict=True):
            is_same = (tensor == before) | (tensor.isnan() & before.isnan())
            tensor.copy_(torch.where(is_same, copy, tensor))
        known = {id(tensor) for tensor, _ in self._written}
        for tensor in _logged():
            if id(tensor) not in known:  # created since, from zeros
                tensor.zero_()
        for iterator in self._iterators:
            iterator.rewind()

    def release(self) -> None:
        """The forwards will not be rerun: stop keeping microbatches."""
        for iterator in self._iterators:
            iterator.release()


def _logged() -> list[Tensor]:
    """megatron-core's logged sums over microbatches: auxiliary losses of routers, and MTP losses."""
    routers = list(router_loss_sums().values())
    return [*routers, *(logged for logged in mtp_entries().values() if isinstance(logged, Tensor))]
