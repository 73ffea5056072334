"""Lower bounds on the span and the makespan of any plan under a memory limit.

For one rank, from the start of its first op (the first F of its first stage) to the end of its last, each of these is a bound:

1. *Work and idle ends.* The rank's own work, plus its unavoidable idle time at both ends. Before its first B it can only run F,
   and only as many as fit the memory; but that B waits for microbatch 0 to travel to the last stage and back. After its last F it
   can only run the B and W of the microbatches in memory; but the last microbatch still has to travel to the last stage and back.
   The two ends add up if not all F fit the memory, because then the last F comes after the first B; otherwise the larger counts.
2. *Memory times time.* A microbatch occupies a stage's activation memory at least from its F through all later stages and back to
   the end of its B, and the part kept for W also during W. The limit times the span is at least the sum over all microbatches.

Two more involve two ranks. The rank of stage 0 starts with the very first F, which has to reach another rank, and from there the
last gradient has to return to stage 0:

3. *Travel, work, travel.* In between, all F and B of that rank must run, and the W that memory does not allow to postpone.
4. *Round trip, free memory, round trip.* Microbatch 0 travels to the last stage and returns with the rank's first B. Until then
   the rank has freed no memory, which limits the number of F that ran. From the start of that B to the end of the rank's last F,
   all other F must run, and at least the B and W that free memory for them; then the last microbatch travels to the last stage
   and back to stage 0. (If not all F fit the memory, the last F does come after the first B.) This bound is tight: ZBV at 1F1B's
   memory reaches it for most of the published times.

The span is at least the largest of these. For the makespan, the time of microbatch 0 to the rank is added to 1 and 2. Every path
includes its links. The bounds are for split B and W; a fused BW can only be later.

With unequal microbatches they hold for every assignment to slots: work and memory are summed over the microbatches, and a path
takes at every stage and link the time of the fastest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.microbatch_costs import COST_LISTS, MicrobatchCosts


@dataclass(frozen=True)
class Bound:
    """Lower bounds for every plan of one placement, number of microbatches, costs and memory limit."""

    span_ms: float
    """No plan has a shorter span."""
    makespan_ms: float
    """No plan has a shorter makespan."""
    bubble_rate: float
    """No plan has a smaller bubble rate (of the span)."""

    def gap(self, span_ms: float) -> float:
        """How far a span is above its lower bound, as a share of the bound; the optimum lies in between."""
        return span_ms / self.span_ms - 1.0 if self.span_ms > 0 else 0.0

    def makespan_gap(self, makespan_ms: float) -> float:
        """How far a makespan is above its lower bound, as a share of the bound."""
        return makespan_ms / self.makespan_ms - 1.0 if self.makespan_ms > 0 else 0.0


def lower_bound(placement: Placement, num_microbatches: int, costs: CostModel, memory_limit: float | None = None) -> Bound:
    """Lower bounds for `num_microbatches` on a placement under a memory limit (1.0 is 1F1B's rank 0; None: no limit)."""
    costs.check_fits(placement, num_microbatches)
    paths = _Paths(placement, costs)
    items = _Items(costs, num_microbatches)
    unit = min(placement.num_ranks, num_microbatches)
    # Plans keep a limit up to rounding, so the bound uses a slightly larger one.
    limit = math.inf if memory_limit is None else memory_limit * unit * (1 + 1e-9) + 1e-9
    span = makespan = busiest = 0.0
    for stages in placement.rank_to_stages:
        forward, backward, wgrad = (items.sum(name, stages) for name in COST_LISTS[:3])
        head, tail = _idle_ends(stages, items, paths, limit)
        all_fit = items.sum("activation", stages) <= limit
        work = forward + backward + wgrad
        own = max(
            work + (max(head, tail) if all_fit else head + tail),
            _memory_time(stages, items, paths) / limit if limit > 0 else 0.0,
        )
        first = stages[0]
        put_off = _most(items.of(stages, "wgrad_ms", "activation_after_backward"), limit)
        until_last_backward = max(forward + backward + max(0.0, wgrad - put_off) + head, paths.there_and_back(first))
        round_trip = paths.down_to(first) + until_last_backward + paths.back_from(first)
        if not all_fit:
            round_trip = max(round_trip, _round_trips_while_freeing(stages, items, paths, limit))
        span = max(span, own, round_trip)
        makespan = max(makespan, paths.down_to(first) + own, round_trip)
        busiest = max(busiest, work)
    return Bound(span, makespan, max(0.0, span - busiest) / span if span > 0 else 0.0)


class _Items:
    """Times and memory of passes as (time, memory, count): one item per stage, or of unequal microbatches one per microbatch."""

    def __init__(self, costs: CostModel, num_microbatches: int) -> None:
        self._m = num_microbatches
        self.parts = [(costs, num_microbatches)]
        every = costs.per_microbatch
        if every is not None:
            single = [every.reordered([index]).means() for index in range(num_microbatches)]
            self.parts = [(CostModel.of_lists(lists), 1) for lists in single]

    def sum(self, name: str, stages: Sequence[int]) -> float:
        """Sum of a list of costs over stages and microbatches."""
        if len(self.parts) == 1:
            costs, count = self.parts[0]
            return count * math.fsum(getattr(costs, name)[stage] for stage in stages)
        return math.fsum(getattr(costs, name)[stage] for costs, _ in self.parts for stage in stages)

    def of(self, stages: Sequence[int], times: str, memory: str) -> list[tuple[float, float, int]]:
        """The items of one kind of pass."""
        return [(getattr(costs, times)[s], getattr(costs, memory)[s], count) for costs, count in self.parts for s in stages]


class _Paths:
    """Times of the fastest microbatch's path through the stages, links included, in milliseconds."""

    def __init__(self, placement: Placement, costs: CostModel) -> None:
        ranks = placement.stage_to_rank
        last = placement.num_stages - 1
        self.down_ms = [_fastest_link(costs, ranks[s], ranks[s + 1]) for s in range(last)]
        self.back_ms = [_fastest_link(costs, ranks[s + 1], ranks[s]) for s in range(last)]
        lists: CostModel | MicrobatchCosts = costs if costs.per_microbatch is None else costs.per_microbatch
        forward, self.backward_ms, wgrad = (
            [min(value) if isinstance(value, tuple) else value for value in getattr(lists, name)] for name in COST_LISTS[:3]
        )
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

    def down_to(self, stage: int) -> float:
        """From the start of F of stage 0 to the start of F of `stage`."""
        return self._down[stage]

    def there_and_back(self, stage: int) -> float:
        """From the start of F of `stage` to the end of its B."""
        return self._turn[stage]

    def back_from(self, stage: int) -> float:
        """From the end of B of `stage` to the end of W of stage 0."""
        return self._back[stage]


def _fastest_link(costs: CostModel, source: int, target: int) -> float:
    if source == target:
        return 0.0
    return costs.comm_ms if costs.links is None else costs.links.shortest_ms(source, target)


def _idle_ends(stages: Sequence[int], items: _Items, paths: _Paths, limit: float) -> tuple[float, float]:
    """Unavoidable idle time of one rank before its first B and after its last F."""
    first, last = stages[0], stages[-1]
    # From the first F of the rank to the start of its first B, which is of its last stage.
    until_backward = paths.down_to(last) - paths.down_to(first) + paths.there_and_back(last) - paths.backward_ms[last]
    forwards = _most(items.of(stages, "forward_ms", "activation"), limit)
    # From the end of the rank's last F to the end of its last W, both of the last microbatch.
    until_end = (
        paths.there_and_back(first)
        - (paths.down_to(last) - paths.down_to(first))
        - paths.forward_ms[last]
        + paths.wgrad_ms[first]
    )
    left = [
        (costs.backward_ms[s] + costs.wgrad_ms[s], costs.activation[s], count) for costs, count in items.parts for s in stages
    ]
    left += items.of(stages, "wgrad_ms", "activation_after_backward")
    return max(0.0, until_backward - forwards), max(0.0, until_end - _most(left, limit))


def _most(items: Sequence[tuple[float, float, int]], limit: float) -> float:
    """The most time that (time, memory, count) items can take within a memory limit; the last item is counted in part."""
    total, headroom = 0.0, limit
    for time, memory, count in sorted(items, key=lambda item: item[0] / item[1] if item[1] > 0 else math.inf, reverse=True):
        share = count if memory <= 0 or count * memory <= headroom else max(0.0, headroom) / memory
        total += share * time
        headroom -= share * memory
    return total


def _round_trips_while_freeing(stages: Sequence[int], items: _Items, paths: _Paths, limit: float) -> float:
    """Bound 4: from the first F of stage 0 to the end of its last W, through the first B and the last F of a rank."""
    last = stages[-1]
    until_backward = paths.down_to(last) + paths.there_and_back(last) - paths.backward_ms[last]
    later = items.sum("forward_ms", stages) - _most(items.of(stages, "forward_ms", "activation"), limit)
    excess = items.sum("activation", stages) - limit
    since_forward = paths.there_and_back(last) - paths.forward_ms[last] + paths.back_from(last)
    return until_backward + later + _least(_freeing(stages, items), excess) + since_forward


def _freeing(stages: Sequence[int], items: _Items) -> list[tuple[float, float, int]]:
    """(time, memory freed, count) of the ops that free memory: a stage's B and W, combined if B frees less per ms."""
    found = []
    for costs, count in items.parts:
        for s in stages:
            backward, wgrad = costs.backward_ms[s], costs.wgrad_ms[s]
            kept = costs.activation_after_backward[s]
            freed = costs.activation[s] - kept
            if backward * kept <= wgrad * freed:  # B frees at least as much memory per millisecond as W
                found += [(backward, freed, count), (wgrad, kept, count)]
            else:
                found.append((backward + wgrad, freed + kept, count))
    return found


def _least(items: Sequence[tuple[float, float, int]], memory: float) -> float:
    """The least time in which (time, memory freed, count) items free `memory`; the last item is counted in part."""
    total, needed = 0.0, memory
    for time, freed, count in sorted((item for item in items if item[1] > 0), key=lambda item: item[0] / item[1]):
        share = min(count, max(0.0, needed) / freed)
        total += share * time
        needed -= share * freed
    return total


def _memory_time(stages: Sequence[int], items: _Items, paths: _Paths) -> float:
    """Sum over all microbatches of activation memory times the shortest time for which it is allocated."""
    sums = [
        count
        * math.fsum(
            costs.activation[s] * paths.there_and_back(s) + costs.activation_after_backward[s] * costs.wgrad_ms[s] for s in stages
        )
        for costs, count in items.parts
    ]
    return sums[0] if len(sums) == 1 else math.fsum(sums)
