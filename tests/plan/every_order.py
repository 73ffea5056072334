"""The exact optimum of a tiny instance by trying every order of the ops, with split and with fused backwards. For tests only.

Unlike `exact` it needs no solver, times need not be whole, microbatches may be unequal and run in any order, and ops may take no
time. Up to about 18 ops.
"""

import itertools
import math
from collections.abc import Iterator

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective

_PARTS = {"F": 1, "B": 1, "W": 1, "BW": 2}
_Cell = tuple[int, int]
"""Stage, microbatch or slice, which are counted through all microbatches."""


def shortest(costs: CostModel, placement: Placement, num_microbatches: int, limit: float, objective: Objective) -> float:
    """The shortest time of any plan within the limit; infinite if there is none.

    Messages do not wait for each other, also on slow links.

    Args:
        costs: of equal or unequal microbatches, or of their slices.
        placement: stage -> rank.
        num_microbatches: m.
        limit: most activation memory per rank, in microbatches.
        objective: which time.
    """
    return _Search(costs, placement, num_microbatches, limit, objective).best


def slices_of(costs: CostModel, num_microbatches: int) -> list[int]:
    return [costs.table.of(i).num_slices for i in range(num_microbatches)]


def _tables(costs: CostModel, placement: Placement, counts: list[int]) -> dict[str, list[list[float]]]:
    """Stage, microbatch or slice -> each cost by its name; "down" and "up" are messages to the next stage and back."""
    cells = [i for i, count in enumerate(counts) for _ in range(count)]
    again = len(cells) // costs.num_slices if costs.table.is_alike else 1  # slices of one microbatch stand for those of all
    tables = {name: [[*row] * again for row in getattr(costs.table, name)] for name in COST_LISTS}
    for name in ("keys", "key_gradients"):
        stages = range(placement.num_stages)
        tables[name] = [[getattr(costs.table, name)[s][costs.table.column(i)] for i in cells] for s in stages]
    rank_of = placement.stage_to_rank
    tables["down"] = [[costs.link_ms(one, other, i) for i in cells] for one, other in itertools.pairwise(rank_of)]
    tables["up"] = [[costs.link_ms(other, one, i) for i in cells] for one, other in itertools.pairwise(rank_of)]
    return tables


class _Search:
    def __init__(self, costs: CostModel, placement: Placement, num_microbatches: int, limit: float, objective: Objective) -> None:
        counts = slices_of(costs, num_microbatches)
        self._costs = _tables(costs, placement, counts)
        self._rank_of, self._limit, self._objective = placement.stage_to_rank, limit, objective
        self._firsts = {0, *itertools.accumulate(counts)}
        self._cells = list(itertools.product(range(placement.num_stages), range(sum(counts))))
        self.best = math.inf
        self._seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        ranks = placement.num_ranks
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
