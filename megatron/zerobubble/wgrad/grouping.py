"""Several Ws of a chunk that run together, weight by weight: those behind the last B, where reductions overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from megatron.zerobubble.wgrad.deferring import DeferringModule, WgradKey
from megatron.zerobubble.wgrad.final import FinalGradient
from megatron.zerobubble.wgrad.split_weight import DeferredGemm

__all__ = ["WgradGroup"]


@dataclass
class _Unit:
    """What is left for one weight, or for a module with a queue of its own."""

    owner: FinalGradient
    gemms: list[DeferredGemm] = field(default_factory=list)
    keys: list[WgradKey] = field(default_factory=list)
    """Ws of a module."""

    @property
    def size(self) -> int:
        """In elements of weights."""
        return (len(self.gemms) + len(self.keys)) * sum(weight.numel() for weight in self.owner.weights)


class WgradGroup:
    """What is left of several Ws, in as many parts of about the same size.

    Args:
        keys: the Ws that run together.
        gemms: for each W what its B left, in B's order.
        modules: for each W the modules that computed their weight gradients in it alone, in B's order.
    """

    __slots__ = ("_size", "_units", "keys", "num_parts")

    def __init__(
        self, keys: Sequence[WgradKey], gemms: Sequence[list[DeferredGemm]], modules: Sequence[list[DeferringModule]]
    ) -> None:
        self.keys = tuple(keys)
        self.num_parts = len(self.keys)
        units: dict[int, _Unit] = {}
        for gemm in chain.from_iterable(gemms):
            units.setdefault(id(gemm.split), _Unit(gemm.split)).gemms.append(gemm)
        for key, own in zip(self.keys, modules, strict=True):
            for module in own:
                units.setdefault(id(module), _Unit(module)).keys.append(key)
        # Reversed, to be popped: each weight's tensors are free before the next one's GEMM starts.
        self._units = sorted(units.values(), key=lambda unit: unit.owner.position)[::-1]
        self._size = self._size_left()

    @property
    def left(self) -> list[DeferredGemm]:
        """The GEMMs that have not been taken."""
        return list(chain.from_iterable(unit.gemms for unit in self._units))

    def take(self, part: int) -> tuple[list[DeferredGemm], list[tuple[DeferringModule, list[WgradKey]]]]:
        """The GEMMs of one part, all those of a weight in a row, and its modules, each with its Ws.

        Parts have about the same size; the last is the rest.
        """
        leave = self._size * (self.num_parts - 1 - part) / self.num_parts
        gemms: list[DeferredGemm] = []
        modules: list[tuple[DeferringModule, list[WgradKey]]] = []
        while self._units and (part == self.num_parts - 1 or self._size_left() > leave):
            unit = self._units.pop()
            gemms += unit.gemms
            if isinstance(unit.owner, DeferringModule):
                modules.append((unit.owner, unit.keys))
        return gemms, modules

    def _size_left(self) -> int:
        return sum(unit.size for unit in self._units)
