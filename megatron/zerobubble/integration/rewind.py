"""Running forwards again: the same microbatches, the same random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.tensor_parallel import random as mcore_random

__all__ = ["Replayed", "Rewind"]


class Replayed:
    """An iterator that can hand out again what it handed out first."""

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
        """From the first item again; from here on nothing is kept."""
        self._again.extend(self._seen or ())
        self._seen = None

    def release(self) -> None:
        """Keep nothing from here on."""
        self._seen = None


class Rewind:
    """Where an iteration began: its data and every random state that megatron-core's forwards use."""

    def __init__(self, iterators: Sequence[Any]) -> None:
        """`iterators` are `Replayed` ones, or None where a rank reads no data."""
        self._iterators = [iterator for iterator in iterators if iterator is not None]
        self._random_states = mcore_random._get_all_rng_states()

    def rewind(self) -> None:
        """Back to the beginning."""
        mcore_random._set_all_rng_states(*self._random_states)
        for iterator in self._iterators:
            iterator.rewind()

    def release(self) -> None:
        """The forwards stand; no microbatch is kept for another run."""
        for iterator in self._iterators:
            iterator.release()
