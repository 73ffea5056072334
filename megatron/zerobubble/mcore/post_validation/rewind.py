"""Rerunning forwards: the same microbatches, the same random numbers, and nothing counted twice.

Besides activations, a forward changes what it reads (`contents`), the buffers of its modules (a router's number of tokens per
expert), the scales of FP8 with delayed scaling, and what megatron-core collects for logging (auxiliary losses of routers, MTP
losses). All are restored. What nobody but the loop knows of is not: plain attributes, frozen weights that a forward changes, and
modules outside of the model.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import random as mcore_random
from torch import Tensor, nn

from megatron.zerobubble.mcore.compat import mtp_entries, router_loss_sums
from megatron.zerobubble.mcore.model.transformer_engine import forget_scales_for_recomputation, scaling_tensors
from megatron.zerobubble.mcore.post_validation.batch_contents import Contents, put_back, refill

__all__ = ["Habits", "Replayed", "Rewind"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Habits:
    """What a loop's forward step was seen to do, in the iterations of one model."""

    changes_tensors: bool = False
    """Whether it changes large tensors of its batches in place, so that these have to be copied."""


class Replayed:
    """A data iterator that can be rewound once to where it was. Its other methods are replayed like `next`.

    Behind each item the random numbers go on where they did when it was read first, also if reading it draws some.

    Args:
        iterator: the loop's.
        habits: of the loop's forward step; updated.
    """

    def __init__(self, iterator: Iterator[Any], habits: Habits) -> None:
        self._iterator = iterator
        self._habits = habits
        self._seen: list[tuple[Any, Contents, _RandomStates]] | None = []
        self._again: deque[tuple[Any, _RandomStates]] = deque()

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Any:
        return self._read(partial(next, self._iterator))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._iterator, name)
        return partial(self._read, value) if callable(value) else value

    def _read(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if self._again:
            item, states = self._again.popleft()
            states.set()
            return item
        item = function(*args, **keywords)
        if self._seen is not None:
            contents = Contents(item, len(self._seen), copies_all=self._habits.changes_tensors)
            self._seen.append((item, contents, _RandomStates()))
        return item

    def rewind(self) -> None:
        """Restart from the first item, as it was; items are no longer kept from here on."""
        seen, self._seen = self._seen or [], None
        for _, contents, _ in reversed(seen):
            contents.restore()
        self._again.extend((item, states) for item, _, states in seen)

    def release(self) -> None:
        """Stop keeping items: the iterator will not be rewound."""
        seen, self._seen = self._seen or [], None
        if not self._habits.changes_tensors and any(contents.is_lost for _, contents, _ in seen):
            self._habits.changes_tensors = True
            _log.info("post-validation copies large tensors of batches from here on, because forward_step changes some in place")


class _RandomStates:
    """The states of all generators of random numbers that a process has by itself: megatron-core's, Python's, numpy's."""

    def __init__(self) -> None:
        self._states = mcore_random._get_all_rng_states(), random.getstate(), np.random.get_state()

    def set(self) -> None:
        """Go on from here."""
        of_torch, of_python, of_numpy = self._states
        mcore_random._set_all_rng_states(*of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class Rewind:
    """A rank's state at the start of an iteration: data iterators, random states, and what forwards write.

    Buffers are known by module and name, because a forward may assign them, or register new ones.

    Args:
        iterators: per chunk a `Replayed` iterator, or None for a chunk that reads no data.
        chunks: this rank's model chunks.
    """

    def __init__(self, iterators: Sequence[Any], chunks: Sequence[nn.Module]) -> None:
        self._iterators = [iterator for iterator in iterators if iterator is not None]
        self._random_states = _RandomStates()
        buffers = [module._buffers for chunk in chunks for module in chunk.modules()]
        self._buffers = [(each, dict(each)) for each in buffers]
        tensors = {id(tensor): tensor for each in buffers for tensor in each.values() if tensor is not None}
        self._written = [(tensor, tensor.clone()) for tensor in (*tensors.values(), *_logged())]
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
        self._random_states.set()
        forget_scales_for_recomputation()
        for owned, at_start in self._buffers:
            refill(owned, at_start)
        for tensor, copy in self._written:
            put_back(tensor, copy)
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
