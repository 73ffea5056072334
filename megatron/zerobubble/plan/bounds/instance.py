"""The instance that a lower bound is for: its items and its paths. `relaxations` has the arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostLists
from megatron.zerobubble.plan.ir import Placement


class Instance:
    """A placement with its costs, number of microbatches and memory limit, as the arguments need them.

    Args:
        placement: stage -> rank.
        costs: times and memory of every stage.
        num_microbatches: m.
        limit: most activation memory per rank, in microbatches.
    """

    def __init__(self, placement: Placement, costs: CostModel, num_microbatches: int, limit: float) -> None:
        self.placement, self.limit = placement, limit
        self.paths, self.items = Paths(placement, costs), Items(costs, num_microbatches)
        self.slowest = self._slowest(placement, costs)

    def _slowest(self, placement: Placement, costs: CostModel) -> Paths:
        """The paths of the microbatch whose way through all stages and back takes longest."""
        m = costs.num_microbatches
        if m is None or costs.table.has_slices:
            return self.paths
        return max((Paths(placement, costs, i) for i in range(m)), key=lambda paths: paths.there_and_back(0) + paths.back_from(0))

    def work(self, stages: Sequence[int]) -> float:
        """Milliseconds of all passes of some stages."""
        return math.fsum(self.items.sum(name, stages) for name in COST_LISTS[:3])

    def alike(self, stages: Sequence[int], names: Sequence[str] = COST_LISTS) -> tuple[CostLists[float], int, int] | None:
        """Costs, a stage, and the number of passes of a rank in each direction, if all of them are equal in these lists."""
        parts = self.items.parts
        if any(len({getattr(costs, name)[s] for costs, _ in parts for s in stages}) > 1 for name in names):
            return None
        return parts[0][0], stages[0], sum(count for _, count in parts) * len(stages)

    def most_in_flight(self, stages: Sequence[int], kept: float = 0.0) -> int:
        """How many passes of a rank fit the memory between their F and B, beside `kept`; 0: no limit, or unequal memory."""
        alike = self.alike(stages, COST_LISTS[3:])
        if alike is None or self.limit == math.inf:
            return 0
        costs, stage, count = alike
        whole = costs.activation[stage]
        memory = max(0.0, self.limit - kept)
        return count if whole * count <= memory else int(memory / whole * (1 + 1e-9))


class Items:
    """Times and memory of passes as (time, memory, count): one item per stage, or of each slice or unequal microbatch."""

    def __init__(self, costs: CostModel, num_microbatches: int) -> None:
        columns = zip(*(zip(*rows, strict=True) for rows in costs.table.with_keys.lists.values()), strict=True)
        passes: list[CostLists[float]] = [CostLists(**dict(zip(COST_LISTS, lists, strict=True))) for lists in columns]
        self.parts = [(each, num_microbatches if costs.table.is_alike else 1) for each in passes]

    def sum(self, name: str, stages: Sequence[int]) -> float:
        """Sum of a list of costs over stages and microbatches."""
        if len(self.parts) == 1:
            costs, count = self.parts[0]
            return count * math.fsum(getattr(costs, name)[stage] for stage in stages)
        return math.fsum(count * getattr(costs, name)[stage] for costs, count in self.parts for stage in stages)

    def of(self, stages: Sequence[int], times: str, memory: str) -> list[tuple[float, float, int]]:
        """The items of one kind of pass."""
        return [(getattr(costs, times)[s], getattr(costs, memory)[s], count) for costs, count in self.parts for s in stages]


class Paths:
    """Times of a path through the stages, links included, in milliseconds.

    With slices it is the path of one that takes at each stage the time of the fastest. From F of a slice to its B all slices
    behind it have F and B as well, at every stage: what that adds at the slowest one is `wait_forward` and `wait_backward`.

    Args:
        placement: stage -> rank.
        costs: times of every stage.
        microbatch: whose times; None: at each stage and link those of the fastest.
    """

    def __init__(self, placement: Placement, costs: CostModel, microbatch: int | None = None) -> None:
        ranks = placement.stage_to_rank
        last = placement.num_stages - 1
        self.down_ms = [_link(costs, ranks[s], ranks[s + 1], microbatch) for s in range(last)]
        self.back_ms = [_link(costs, ranks[s + 1], ranks[s], microbatch) for s in range(last)]
        width = 1 if microbatch is None else costs.num_microbatches or 1
        times = [
            [min(row) if microbatch is None else row[microbatch] for row in costs.rows(name, width)] for name in COST_LISTS[:3]
        ]
        forward, self.backward_ms, wgrad = times
        self.forward_ms, self.wgrad_ms = forward, wgrad
        self._down = [0.0]
        self._back = [wgrad[0]]
        for s in range(last):
            self._down.append(self._down[-1] + forward[s] + self.down_ms[s])
        for s in range(last):
            self._back.append(self._back[-1] + self.back_ms[s] + self.backward_ms[s])
        self._turn = [forward[last] + self.backward_ms[last]]
        for s in reversed(range(last)):
            self._turn.append(self._turn[-1] + (self.down_ms[s] + self.back_ms[s]) + forward[s] + self.backward_ms[s])
        self._turn.reverse()
        self._forwards, self._backwards = (_waits(costs, name) for name in COST_LISTS[:2])
        self._firsts = costs.table.starts[:-1] if costs.table.has_slices else ()

    def down_to(self, stage: int) -> float:
        """From the start of F of stage 0 to the start of F of `stage`."""
        return self._down[stage]

    def there_and_back(self, stage: int) -> float:
        """From the start of F of `stage` to the end of its B."""
        return self._turn[stage]

    def wait_forward(self, stage: int, part: int | None = None) -> float:
        """Time of F of slice `part` and all behind it, less the fastest, at the slowest stage from `stage` on; 0 without slices.

        Slices are counted through all unequal microbatches. Without `part`, it is all slices of the fastest microbatch.
        """
        return self._wait(self._forwards, stage, part)

    def wait_backward(self, stage: int, part: int | None = None) -> float:
        """The same of B."""
        return self._wait(self._backwards, stage, part)

    def _wait(self, waits: list[list[float]], stage: int, part: int | None) -> float:
        if not waits:
            return 0.0
        return waits[part][stage] if part is not None else min(waits[first][stage] for first in self._firsts)

    @property
    def longest_wait(self) -> float:
        """Both waits of the microbatch for which they are longest, from its first slice and stage 0 on."""
        return max((self.wait_forward(0, part) + self.wait_backward(0, part) for part in self._firsts), default=0.0)

    def back_from(self, stage: int) -> float:
        """From the end of B of `stage` to the end of W of stage 0."""
        return self._back[stage]


def _waits(costs: CostModel, name: str) -> list[list[float]]:
    """Per slice j and stage s, the most, over stages from s on, that the slices from j on take longer than the fastest slice."""
    table = costs.table
    if not table.has_slices:
        return []
    rows = table.lists[name]
    fastest = list(map(min, rows))
    longer = [
        [math.fsum(row[part:end]) - least for row, least in zip(rows, fastest, strict=True)]
        for begin, end in pairwise(table.starts)
        for part in range(begin, end)
    ]
    return [list(accumulate(reversed(of_part), max))[::-1] for of_part in longer]


def _link(costs: CostModel, source: int, target: int, microbatch: int | None) -> float:
    if microbatch is not None:
        return costs.link_ms(source, target, microbatch)
    if source == target:
        return 0.0
    return costs.comm_ms if costs.links is None else costs.links.shortest_ms(source, target)
