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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement


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
    costs.check_fits(placement)
    paths = _Paths(placement, costs)
    unit = min(placement.num_ranks, num_microbatches)
    # Plans keep a limit up to rounding, so the bound uses a slightly larger one.
    limit = math.inf if memory_limit is None else memory_limit * unit * (1 + 1e-9) + 1e-9
    span = makespan = busiest = 0.0
    for stages in placement.rank_to_stages:
        forward, backward, wgrad = (
            num_microbatches * math.fsum(times[stage] for stage in stages)
            for times in (costs.forward_ms, costs.backward_ms, costs.wgrad_ms)
        )
        head, tail = _idle_ends(stages, num_microbatches, costs, paths, limit)
        all_fit = num_microbatches * math.fsum(costs.activation[stage] for stage in stages) <= limit
        work = forward + backward + wgrad
        own = max(
            work + (max(head, tail) if all_fit else head + tail),
            _memory_time(stages, num_microbatches, costs, paths) / limit if limit > 0 else 0.0,
        )
        first = stages[0]
        put_off = _most([(costs.wgrad_ms[s], costs.activation_after_backward[s], num_microbatches) for s in stages], limit)
        until_last_backward = max(forward + backward + max(0.0, wgrad - put_off) + head, paths.there_and_back(first))
        round_trip = paths.down_to(first) + until_last_backward + paths.back_from(first)
        if not all_fit:
            round_trip = max(round_trip, _round_trips_while_freeing(stages, num_microbatches, costs, paths, limit))
        span = max(span, own, round_trip)
        makespan = max(makespan, paths.down_to(first) + own, round_trip)
        busiest = max(busiest, work)
    return Bound(span, makespan, max(0.0, span - busiest) / span if span > 0 else 0.0)


class _Paths:
    """Times of one microbatch's path through the stages, links included, in milliseconds."""

    def __init__(self, placement: Placement, costs: CostModel) -> None:
        ranks = placement.stage_to_rank
        last = placement.num_stages - 1
        self._link = [costs.comm_ms if ranks[s] != ranks[s + 1] else 0.0 for s in range(last)]
        self._down = [0.0]
        self._back = [costs.wgrad_ms[0]]
        for s in range(last):
            self._down.append(self._down[-1] + costs.forward_ms[s] + self._link[s])
        for s in range(last):
            self._back.append(self._back[-1] + self._link[s] + costs.backward_ms[s])
        self._turn = [costs.forward_ms[last] + costs.backward_ms[last]]
        for s in reversed(range(last)):
            self._turn.append(self._turn[-1] + 2 * self._link[s] + costs.forward_ms[s] + costs.backward_ms[s])
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


def _idle_ends(
    stages: Sequence[int], num_microbatches: int, costs: CostModel, paths: _Paths, limit: float
) -> tuple[float, float]:
    """Unavoidable idle time of one rank before its first B and after its last F."""
    first, last = stages[0], stages[-1]
    # From the first F of the rank to the start of its first B, which is of its last stage.
    until_backward = paths.down_to(last) - paths.down_to(first) + paths.there_and_back(last) - costs.backward_ms[last]
    forwards = _most(
        [(costs.forward_ms[s], costs.activation[s], num_microbatches) for s in stages],
        limit,
    )
    # From the end of the rank's last F to the end of its last W, both of the last microbatch.
    until_end = (
        paths.there_and_back(first)
        - (paths.down_to(last) - paths.down_to(first))
        - costs.forward_ms[last]
        + costs.wgrad_ms[first]
    )
    left = [(costs.backward_ms[s] + costs.wgrad_ms[s], costs.activation[s], num_microbatches) for s in stages]
    left += [(costs.wgrad_ms[s], costs.activation_after_backward[s], num_microbatches) for s in stages]
    return max(0.0, until_backward - forwards), max(0.0, until_end - _most(left, limit))


def _most(items: Sequence[tuple[float, float, int]], limit: float) -> float:
    """The most time that (time, memory, count) items can take within a memory limit; the last item is counted in part."""
    total, headroom = 0.0, limit
    for time, memory, count in sorted(items, key=lambda item: item[0] / item[1] if item[1] > 0 else math.inf, reverse=True):
        share = count if memory <= 0 or count * memory <= headroom else max(0.0, headroom) / memory
        total += share * time
        headroom -= share * memory
    return total


def _round_trips_while_freeing(
    stages: Sequence[int], num_microbatches: int, costs: CostModel, paths: _Paths, limit: float
) -> float:
    """Bound 4: from the first F of stage 0 to the end of its last W, through the first B and the last F of a rank."""
    last = stages[-1]
    until_backward = paths.down_to(last) + paths.there_and_back(last) - costs.backward_ms[last]
    forwards = [(costs.forward_ms[s], costs.activation[s], num_microbatches) for s in stages]
    later = num_microbatches * math.fsum(costs.forward_ms[s] for s in stages) - _most(forwards, limit)
    excess = num_microbatches * math.fsum(costs.activation[s] for s in stages) - limit
    since_forward = paths.there_and_back(last) - costs.forward_ms[last] + paths.back_from(last)
    return until_backward + later + _least(_freeing(stages, num_microbatches, costs), excess) + since_forward


def _freeing(stages: Sequence[int], num_microbatches: int, costs: CostModel) -> list[tuple[float, float, int]]:
    """(time, memory freed, count) of the ops that free memory: a stage's B and W, combined if B frees less per ms."""
    items = []
    for s in stages:
        backward, wgrad = costs.backward_ms[s], costs.wgrad_ms[s]
        kept = costs.activation_after_backward[s]
        freed = costs.activation[s] - kept
        if backward * kept <= wgrad * freed:  # B frees at least as much memory per millisecond as W
            items += [(backward, freed, num_microbatches), (wgrad, kept, num_microbatches)]
        else:
            items.append((backward + wgrad, freed + kept, num_microbatches))
    return items


def _least(items: Sequence[tuple[float, float, int]], memory: float) -> float:
    """The least time in which (time, memory freed, count) items free `memory`; the last item is counted in part."""
    total, needed = 0.0, memory
    for time, freed, count in sorted((item for item in items if item[1] > 0), key=lambda item: item[0] / item[1]):
        share = min(count, max(0.0, needed) / freed)
        total += share * time
        needed -= share * freed
    return total


def _memory_time(stages: Sequence[int], num_microbatches: int, costs: CostModel, paths: _Paths) -> float:
    """Sum over all microbatches of activation memory times the shortest time for which it is allocated."""
    return num_microbatches * math.fsum(
        costs.activation[s] * paths.there_and_back(s) + costs.activation_after_backward[s] * costs.wgrad_ms[s] for s in stages
    )
