"""The Ws of several microbatches that run together, weight by weight, with gradients that are sharded in between (ZeRO-2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from megatron.zerobubble.wgrad.split_weight import DeferredGemm

__all__ = ["WgradGroup"]


class WgradGroup:
    """The GEMMs that are left of the Ws of several microbatches, in parts of about the same size.

    Args:
        microbatches: whose Ws run together.
        gemms: for each microbatch what its B left, in B's order.
    """

    __slots__ = ("_size", "_weights", "microbatches", "num_parts")

    def __init__(self, microbatches: Sequence[int], gemms: Sequence[list[DeferredGemm]]) -> None:
        self.microbatches = tuple(microbatches)
        self.num_parts = len(self.microbatches)
        weights: dict[int, list[DeferredGemm]] = {}
        for gemm in chain.from_iterable(gemms):
            weights.setdefault(id(gemm.split), []).append(gemm)
        # Reversed, to be popped: each weight's tensors are free before the next one's GEMM starts.
        self._weights = sorted(weights.values(), key=lambda each: each[0].split.position)[::-1]
        self._size = self._size_left()

    @property
    def left(self) -> list[DeferredGemm]:
        """The GEMMs that have not been taken."""
        return list(chain.from_iterable(self._weights))

    def take(self, part: int) -> list[DeferredGemm]:
        """The GEMMs of one part, all those of a weight in a row. Parts have about the same size; the last is the rest."""
        leave = self._size * (self.num_parts - 1 - part) / self.num_parts
        gemms: list[DeferredGemm] = []
        while self._weights and (part == self.num_parts - 1 or self._size_left() > leave):
            gemms += self._weights.pop()
        return gemms

    def _size_left(self) -> int:
        return sum(each[0].split.weight.numel() * len(each) for each in self._weights)
