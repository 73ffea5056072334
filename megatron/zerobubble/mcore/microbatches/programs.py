"""The programs of a schedule by the pieces that they run: one store for calls with equal microbatches and with unequal ones."""

from __future__ import annotations

from collections.abc import Callable

from megatron.zerobubble.mcore.microbatches.length_exchange import LengthsOfReplicas
from megatron.zerobubble.plan.communication import Program

__all__ = ["Pieces", "Programs"]

Pieces = int | LengthsOfReplicas
"""A number of equal microbatches, or the lengths of unequal ones, in the order in which the data comes."""

_NUM_KEPT = 4
"""Programs kept for lengths that come again."""


class Programs:
    """Makes each program once, and keeps all of equal microbatches and the last few of unequal ones."""

    def __init__(self) -> None:
        self._found: dict[tuple[Pieces, bool], Program] = {}
        """By pieces, and whether only their forwards run; the last used one is the last."""

    def of(self, pieces: Pieces, make: Callable[[], Program], *, forward_only: bool = False) -> Program:
        """The program for these pieces, which `make` returns if it is not known."""
        key = pieces, forward_only
        self._found[key] = self._found.pop(key) if key in self._found else make()
        unequal = [each for each in self._found if not isinstance(each[0], int)]
        for oldest in unequal[:-_NUM_KEPT]:
            del self._found[oldest]
        return self._found[key]

    def clear(self) -> None:
        """Make all anew: the schedule has other plans, or costs have changed."""
        self._found.clear()
