"""The arguments behind `bound.lower_bound`: what every plan has to do on one rank, and between that rank and stage 0.

The proofs are in docs/adr/0039. For one rank, from the start of its first op (the first F of its first stage) to its last:

1. *Work and idle ends.* The rank's own work, plus its unavoidable idle time at both ends. Before its first B it can only run F,
   and only as many as fit the memory; but that B waits for microbatch 0 to travel to the last stage and back. After its last F it
   can only run the B and W of the microbatches in memory; but the last microbatch still has to travel to the last stage and back.
   The two ends add up if not all F fit the memory, because then the last F comes after the first B; otherwise the larger counts.
2. *Memory times time*. A microbatch occupies a stage's activation memory at least from its F through all later stages and back to
   the end of its B. The limit times the time is at least the sum over all microbatches, and what is missing below the limit
   while the rank runs its first F, which have yet to fill the memory; its last B, which empty it; and a W, which still needs
   its part. A rank runs one op at a time, so these add up. Where all passes of the rank need the same memory, *passes in flight
   times time* counts whole passes: during the k-th F and the k-th last B at most k are in flight, during a W as many as fit
   beside what it needs, which often is one less, and during the W of the k-th last B at most k - 1.

Others involve two ranks. The rank of stage 0 starts with the very first F, which has to reach another rank, and from there the
last gradient has to return to stage 0:

3. *Travel, work, travel.* In between, all F and B of that rank must run, and the W that memory does not allow to postpone.
4. *Travel, memory times time, travel.* In between, 2 holds for the rank, but for the W that may come later.
5. *Round trip, free memory, round trip.* From the rank's first F to its last, all of its F must run, and at least the B and W
   that free the memory for them; while the first B has not arrived, the rank can only run the F that fit the memory. Then the
   last microbatch travels to the last stage and back to stage 0. (Not all F fit the memory, so the last comes after the first B.)
6. *One microbatch*, the slowest, travels from stage 0 to the last stage and back.

A makespan is at least 1 and 2 plus the time of microbatch 0 to the rank, and at least each of the others. Every path includes its
links. With slices a pass is of one slice, and between its F and its B are those of the slices behind it. A fused BW is a B and a
W without a break: its gradients are sent later, and instead of the part for W it needs the activations of its stage until its
end, and with them those of the rank's earlier stages, whose B come later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.zerobubble.plan.bounds.instance import Instance
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS

_Terms = tuple[float, ...]
"""Milliseconds whose sum is a bound."""


class LeastTimes(NamedTuple):
    """Lower bounds that one argument about one rank gives."""

    span_ms: float
    makespan_ms: float


def arguments(instance: Instance) -> Iterator[LeastTimes]:
    """Every argument that applies, for every rank."""
    for stages in instance.placement.rank_to_stages:
        yield from _Arguments(instance, stages).all()


class _Arguments:
    """The arguments about one rank."""

    def __init__(self, instance: Instance, stages: Sequence[int]) -> None:
        self._instance, self._stages = instance, stages
        self._paths, self._items, self._limit = instance.paths, instance.items, instance.limit
        self._forward, self._backward, self._wgrad = (instance.items.sum(name, stages) for name in COST_LISTS[:3])
        self._most = instance.most_in_flight(stages)
        self._all_fit = instance.items.sum("activation", stages) <= instance.limit
        self._left = self._most_left()
        self._head, self._tail = self._idle_ends()
        self._down = self._paths.down_to(stages[0])  # microbatch 0 to the rank
        self._back = self._paths.back_from(stages[0])  # the last gradient back to stage 0, with its W

    def all(self) -> Iterator[LeastTimes]:
        """Those about the rank's own time, and those that begin with the first F of stage 0 and end with its last W."""
        head, tail = self._head, self._tail
        if self._all_fit:
            head, tail = (head, 0.0) if head >= tail else (0.0, tail)
        yield self._own((self._forward, self._backward, self._wgrad, head, tail))
        if 0 < self._limit < math.inf:
            areas = [self._in_flight()] if self._most > 0 else []
            if not areas or len(self._items.parts) > 1:
                areas.append(self._memory())
            for whole, between in areas:
                yield self._own(whole)
                yield _of_stage_0((self._down, *between, self._back))
        yield _of_stage_0(self._there_and_back())
        yield _of_stage_0(self._work_between())
        if not self._all_fit:
            yield _of_stage_0(self._freeing())

    def _own(self, terms: _Terms) -> LeastTimes:
        """Of an argument about the rank's own time: for the makespan, microbatch 0 has to reach that rank first."""
        return LeastTimes(math.fsum(terms), math.fsum((self._down, *terms)))

    def _in_flight(self) -> tuple[_Terms, _Terms]:
        """Passes in flight times time over the rank's own time, and from its first F to its last B, where some W are left."""
        alike = self._instance.alike(self._stages, COST_LISTS[3:])
        assert alike is not None
        costs, stage, total = alike
        forward, backward, wgrad = (
            min(times[s] for s in self._stages)
            for times in (self._paths.forward_ms, self._paths.backward_ms, self._paths.wgrad_ms)
        )
        most, steps = self._most, self._most * (self._most - 1) / 2
        after = costs.activation_after_backward[stage]
        beside = min(1, most - self._instance.most_in_flight(self._stages, after))
        pending = min(after, costs.activation[stage])  # a fused BW whose W is left still needs its activations
        most_pending = total if pending * total <= self._limit else self._limit / pending
        later = most_pending * self._longest("wgrad_ms")
        turns = (
            count * math.fsum(self._turn(s, part) for s in self._stages) for part, (_, count) in enumerate(self._items.parts)
        )
        area = (
            math.fsum(turns),  # passes from F to B
            steps * forward,  # missing during the first F
            steps * backward,  # missing during the last B
        )
        last = (most * (most + 1) / 2 - most * beside) * wgrad  # missing during the last W
        whole = (*area, beside * self._wgrad, last)
        between = (*area, beside * max(0.0, self._wgrad - later))
        return _over(whole, most), _over(between, most)

    def _memory(self) -> tuple[_Terms, _Terms]:
        """The same for memory times time. Only W whose memory fits the limit together are left for later."""
        between, during = [], []
        for part, (costs, count) in enumerate(self._items.parts):
            earlier = 0.0
            for s in self._stages:
                earlier += costs.activation[s]
                between.append(count * costs.activation[s] * self._turn(s, part))
                during.append(count * min(costs.activation_after_backward[s], earlier) * costs.wgrad_ms[s])
        area = (
            math.fsum(between),  # activations from F to B
            self._missing("forward_ms"),  # during the first F
            self._missing("backward_ms"),  # during the last B
        )
        in_time = math.fsum(during), max(0.0, math.fsum(during) - self._longest("wgrad_ms") * self._limit)
        whole, some = (_over((*area, wgrad), self._limit) for wgrad in in_time)
        return whole, some

    def _turn(self, stage: int, part: int) -> float:
        """The least time from the start of F of `stage` to the end of its B, of one slice if there are several."""
        paths = self._paths
        return paths.there_and_back(stage) + paths.wait_forward(stage, part) + paths.wait_backward(stage, part)

    def _longest(self, times: str) -> float:
        return max(time for time, _, _ in self._items.of(self._stages, times, "activation"))

    def _missing(self, times: str) -> float:
        """Area below the limit while ops that take so long fill or empty the memory.

        After t milliseconds of F the activations are at most the largest plus t times the most that any F allocates per
        millisecond; the same with the milliseconds of B that are left.
        """
        ops = [(time, memory) for time, memory, _ in self._items.of(self._stages, times, "activation") if memory > 0]
        rate = max((memory / time if time > 0 else math.inf for time, memory in ops), default=math.inf)
        missing = self._limit - max((memory for _, memory in ops), default=math.inf)
        if missing <= 0 or not math.isfinite(rate):
            return 0.0
        length = min(missing / rate, self._items.sum(times, self._stages))
        return missing * length - rate * length * length / 2

    def _there_and_back(self) -> _Terms:
        """One microbatch alone, the slowest: the time of all its passes, and W of stage 0."""
        paths, first = self._instance.slowest, self._stages[0]
        return (
            paths.down_to(first),
            paths.there_and_back(first) + paths.longest_wait,
            paths.back_from(first),
        )

    def _work_between(self) -> _Terms:
        # A W that is left after the last B needs its part; that of a fused BW needs the activations instead.
        pending = [
            (costs.wgrad_ms[s], min(costs.activation[s], costs.activation_after_backward[s]), count)
            for costs, count in self._items.parts
            for s in self._stages
        ]
        return (
            self._down,
            self._head,
            self._forward,
            self._backward,
            max(0.0, self._wgrad - _most(pending, self._limit)),  # W that memory does not allow to put off
            self._back,
        )

    def _freeing(self) -> _Terms:
        """From the first F of stage 0 to the end of its last W, through the first B and the last F of a rank."""
        paths, last = self._paths, self._stages[-1]
        since_forward = paths.there_and_back(last) - paths.forward_ms[last] + paths.wait_backward(0) + paths.back_from(last)
        return (
            self._down,
            self._head,
            self._forward,
            max(0.0, self._backward + self._wgrad - self._left),  # B and W that free memory for them
            since_forward,  # the last microbatch to the last stage and back to stage 0, with its W
        )

    def _idle_ends(self) -> tuple[float, float]:
        """Unavoidable idle time of one rank before its first B and after its last F."""
        paths, first, last = self._paths, self._stages[0], self._stages[-1]
        # From the first F of the rank to the start of its first B, which is of its last stage.
        until_backward = paths.down_to(last) - paths.down_to(first) + paths.there_and_back(last) - paths.backward_ms[last]
        until_backward += paths.wait_forward(first)
        forwards = _most(self._items.of(self._stages, "forward_ms", "activation"), self._limit)
        if self._most:
            forwards = min(forwards, self._most * self._longest("forward_ms"))
        # From the end of the rank's last F to the end of its last W, both of the last microbatch.
        inside = paths.down_to(last) - paths.down_to(first)
        until_end = paths.there_and_back(first) - inside - paths.forward_ms[last] + paths.wgrad_ms[first]
        until_end += paths.wait_backward(first)
        return max(0.0, until_backward - forwards), max(0.0, until_end - self._left)

    def _most_left(self) -> float:
        """The most time of the B and W left after the last F, whose memory fits the limit; whole passes if all are alike."""
        limit, stages, parts = self._limit, self._stages, self._items.parts
        alike = self._instance.alike(stages)
        if alike is not None and limit < math.inf:
            costs, s, count = alike
            activation, kept, wgrad = costs.activation[s], costs.activation_after_backward[s], costs.wgrad_ms[s]
            most = 0.0
            for whole in range(count + 1):
                headroom = limit - whole * activation
                if headroom < 0:
                    break
                pending = count - whole if kept <= 0 else int(min(count - whole, headroom / kept * (1 + 1e-9)))
                most = max(most, whole * (costs.backward_ms[s] + wgrad) + pending * wgrad)
            return most
        items = []
        for costs, count in parts:
            for s in stages:
                backward, wgrad = costs.backward_ms[s], costs.wgrad_ms[s]
                kept = costs.activation_after_backward[s]
                freed = costs.activation[s] - kept
                if backward * kept <= wgrad * freed:  # B frees at least as much memory per millisecond as W
                    items += [(backward, freed, count), (wgrad, kept, count)]
                else:
                    items += [(backward + wgrad, freed + kept, count), (wgrad, kept, count)]
        return _most(items, limit)


def _of_stage_0(terms: _Terms) -> LeastTimes:
    """Of an argument that begins with the first op of all, so that span and makespan have one bound."""
    total = math.fsum(terms)
    return LeastTimes(total, total)


def _over(areas: _Terms, divisor: float) -> _Terms:
    return tuple(area / divisor for area in areas)


def _most(items: Sequence[tuple[float, float, int]], limit: float) -> float:
    """The most time that (time, memory, count) items can take within a memory limit; the last item is counted in part."""
    total, headroom = 0.0, limit
    for time, memory, count in sorted(items, key=lambda item: item[0] / item[1] if item[1] > 0 else math.inf, reverse=True):
        share = count if memory <= 0 or count * memory <= headroom else max(0.0, headroom) / memory
        total += share * time
        headroom -= share * memory
    return total
