"""The exact optimum of a tiny instance by trying every order of the ops, with split and with fused backwards. For tests only.

Unlike `exact` it needs no solver, times need not be whole, microbatches may be unequal and run in any order, and ops may take no
time. Up to about 18 ops.
"""

import itertools
import math
from collections.abc import Iterator

from megatron.zerobubble.plan.objective import Objective

_PARTS = {"F": 1, "B": 1, "W": 1, "BW": 2}
_Cell = tuple[int, int]
"""Stage, microbatch."""


def shortest(
    costs: dict[str, list[list[float]]], rank_of: list[int], limit: float, objective: Objective, slices: list[int]
) -> float:
    """The shortest time of any plan within the limit; infinite if there is none.

    Args:
        costs: per stage and microbatch or slice, by the names of `CostModel`, and "down" and "up": messages to the next stage and
            back; "keys" and "key_gradients" of the microbatch of each.
        rank_of: stage -> rank.
        limit: most activation memory per rank, in microbatches.
        objective: which time.
        slices: of every microbatch, counted through all of them.
    """
    return _Search(costs, rank_of, limit, objective, slices).best


class _Search:
    def __init__(
        self, costs: dict[str, list[list[float]]], rank_of: list[int], limit: float, objective: Objective, slices: list[int]
    ) -> None:
        self._costs, self._rank_of, self._limit, self._objective = costs, rank_of, limit, objective
        self._firsts = {0, *itertools.accumulate(slices)}
        self._cells = [(stage, i) for stage in range(len(rank_of)) for i in range(len(costs["down"][0]))]
        self.best = math.inf
        self._seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        ranks = max(rank_of) + 1
        self._continue(dict.fromkeys(self._cells, 0), {}, [math.nan] * ranks, [0.0] * ranks, [0.0] * ranks)

    def _continue(
        self,
        done: dict[_Cell, int],
        ends: dict[tuple[str, _Cell], float],
        first: list[float],
        free: list[float],
        held: list[float],
    ) -> None:
        """Try every op as the next one of its rank; `done` counts F, B and W of every cell."""
        if min(done.values()) == 3:
            own = max(end - start for start, end in zip(first, free, strict=True))
            self.best = min(self.best, own if self._objective is Objective.SPAN else max(free) - min(first))
            return
        state = (*free, *(0.0 if math.isnan(start) else -start for start in first), *self._awaited(done, ends))
        others = self._seen.setdefault(tuple(done.values()), [])
        if any(all(a <= b for a, b in zip(other, state, strict=True)) for other in others):
            return  # an order that did the same ops was never later
        others.append(state)
        for cell, kind, ready in self._possible(done, ends):
            stage, i = cell
            rank = self._rank_of[stage]
            f, b, w, whole, kept = (
                self._costs[name][stage][i]
                for name in ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")
            )
            memory = held[rank] + {"F": whole, "B": kept - whole, "W": -kept, "BW": -whole}[kind]
            keys, gradients = self._costs["keys"][stage][i], self._costs["key_gradients"][stage][i]
            is_first, is_last = i in self._firsts, i + 1 in self._firsts
            gradients *= not (is_first and is_last)
            memory += keys if kind == "F" and is_first else gradients if kind in ("B", "BW") and is_last else 0.0
            memory -= keys + gradients if kind in ("B", "BW") and is_first else 0.0
            if memory > self._limit:
                continue
            start = max(free[rank], ready)
            end = start + {"F": f, "B": b, "W": w, "BW": b + w}[kind]
            begun = start if math.isnan(first[rank]) else first[rank]
            self._continue(
                done | {cell: done[cell] + _PARTS[kind]},
                ends | {(kind[0], cell): end},
                _with(first, rank, begun),
                _with(free, rank, end),
                _with(held, rank, memory),
            )

    def _possible(self, done: dict[_Cell, int], ends: dict[tuple[str, _Cell], float]) -> Iterator[tuple[_Cell, str, float]]:
        """Ops whose inputs are computed, and when these arrive."""
        for (stage, i), count in done.items():
            before, after = (stage - 1, i), (stage + 1, i)
            earlier, later = (stage, i - 1), (stage, i + 1)
            if count == 0 and i not in self._firsts and done[earlier] < 1:
                continue
            if count == 1 and i + 1 not in self._firsts and done[later] < 2:
                continue
            if count == 0 and (stage == 0 or done[before] >= 1):
                yield (stage, i), "F", ends["F", before] + self._costs["down"][stage - 1][i] if stage else 0.0
            elif count == 1 and done.get(after, 2) >= 2:
                ready = ends["B", after] + self._costs["up"][stage][i] if after in done else 0.0
                yield (stage, i), "B", ready
                yield (stage, i), "BW", ready
            elif count == 2:
                yield (stage, i), "W", 0.0

    def _awaited(self, done: dict[_Cell, int], ends: dict[tuple[str, _Cell], float]) -> Iterator[float]:
        """When results were computed that a later op still needs."""
        for stage, i in self._cells:
            yield ends["F", (stage, i)] if done[stage, i] >= 1 and done.get((stage + 1, i), 1) == 0 else 0.0
            yield ends["B", (stage, i)] if done[stage, i] >= 2 and done.get((stage - 1, i), 2) < 2 else 0.0


def _with(values: list[float], at: int, value: float) -> list[float]:
    return [*values[:at], value, *values[at + 1 :]]
