"""The arguments behind `bound.lower_bound`: what every plan has to do on one rank, and between that rank and stage 0.

The proofs are in docs/adr/0039. For one rank, from the start of its first op (the first F of its first stage) to its last:

1. *Work and idle ends.* The rank's own work, plus its unavoidable idle time at both ends. Before its first B it can only run F,
   and only as many as fit the memory; but that B waits for microbatch 0 to travel to the last stage and back. After its last F it
   can only run the B and W of the microbatches in memory; but the last microbatch still has to travel to the last stage and back.
   The two ends add up if not all F fit the memory, because then the last F comes after the first B; otherwise the larger counts.
2. *Memory times time* (`in_flight`, `memory_time`). A microbatch occupies a stage's activation memory at least from its F through
   all later stages and back to the end of its B. The limit times the time is at least the sum over all microbatches, and what is
   missing below the limit while the rank runs its first F, its last B, and W.

Others involve two ranks. The rank of stage 0 starts with the very first F, which has to reach another rank, and from there the
last gradient has to return to stage 0:

3. *Travel, work, travel.* In between, all F and B of that rank must run, and the W that memory does not allow to postpone.
4. *Travel, memory times time, travel.* In between, 2 holds for the rank, but for the W that may come later.
5. *Round trip, free memory, round trip.* From the rank's first F to its last, all of its F must run, and at least the B and W
   that free the memory for them; while the first B has not arrived, the rank can only run the F that fit the memory. Then the
   last microbatch travels to the last stage and back to stage 0. (Not all F fit the memory, so the last comes after the first B.)
6. *One microbatch*, the slowest, travels from stage 0 to the last stage and back.

A makespan is at least 1 and 2 plus the time of microbatch 0 to the rank, and at least each of the others. Every path includes its
links. A fused BW is a B and a W without a break: its gradients leave later, and it never holds what B would leave for W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron.zerobubble.plan.bounds.in_flight import passes_in_flight, travel_passes_travel
from megatron.zerobubble.plan.bounds.instance import Derivation, Instance, Items
from megatron.zerobubble.plan.bounds.memory_time import memory_times_time
from megatron.zerobubble.plan.costs.microbatch_costs import COST_LISTS


def derivations(instance: Instance) -> Iterator[Derivation]:
    """Every bound that applies, for every rank."""
    for rank, stages in enumerate(instance.placement.rank_to_stages):
        head, tail = _idle_ends(instance, stages)
        yield _work_and_idle_ends(instance, rank, stages, head, tail)
        if instance.most_in_flight(stages) > 0:
            yield passes_in_flight(instance, rank, stages)
            yield travel_passes_travel(instance, rank, stages)
        elif 0 < instance.limit < math.inf:
            yield from memory_times_time(instance, rank, stages)
        yield _there_and_back(instance, rank, stages[0])
        yield _travel_work_travel(instance, rank, stages, head)
        if not instance.all_fit(stages):
            yield _round_trips_while_freeing(instance, rank, stages, head)


def _work_and_idle_ends(instance: Instance, rank: int, stages: Sequence[int], head: float, tail: float) -> Derivation:
    if instance.all_fit(stages):
        head, tail = (head, 0.0) if head >= tail else (0.0, tail)
    ends = (("idle before the first B", head), ("idle after the last F", tail))
    return Derivation("work and idle ends", (rank,), (*_passes(instance, stages), *ends), instance.memory())


def _there_and_back(instance: Instance, rank: int, first: int) -> Derivation:
    """One microbatch alone, the slowest: the time of all its passes, and W of stage 0."""
    paths = instance.slowest
    terms = (
        ("stage 0 to the rank", paths.down_to(first)),
        ("from F to B of the rank", paths.there_and_back(first)),
        ("back to stage 0, with its W", paths.back_from(first)),
    )
    return Derivation("one microbatch", instance.with_stage_0(rank), terms)


def _travel_work_travel(instance: Instance, rank: int, stages: Sequence[int], head: float) -> Derivation:
    paths, items = instance.paths, instance.items
    forward, backward, wgrad = _passes(instance, stages)
    put_off = _most(_pending(stages, items), instance.limit)
    terms = (
        ("microbatch 0 to the rank", paths.down_to(stages[0])),
        ("idle before the first B", head),
        forward,
        backward,
        ("W that memory does not allow to put off", max(0.0, wgrad[1] - put_off)),
        ("the last gradient back to stage 0, with its W", paths.back_from(stages[0])),
    )
    return Derivation("travel, work, travel", instance.with_stage_0(rank), terms, instance.memory())


def _round_trips_while_freeing(instance: Instance, rank: int, stages: Sequence[int], head: float) -> Derivation:
    """From the first F of stage 0 to the end of its last W, through the first B and the last F of a rank."""
    paths, items, last = instance.paths, instance.items, stages[-1]
    done = items.sum("backward_ms", stages) + items.sum("wgrad_ms", stages) - _most_left(instance, stages)
    since_forward = paths.there_and_back(last) - paths.forward_ms[last] + paths.back_from(last)
    terms = (
        ("microbatch 0 to the rank", paths.down_to(stages[0])),
        ("idle before the first B", head),
        ("F", items.sum("forward_ms", stages)),
        ("B and W that free memory for them", max(0.0, done)),
        ("the last microbatch to the last stage and back to stage 0, with its W", since_forward),
    )
    excess = items.sum("activation", stages) - instance.limit
    memory = instance.memory(**{"activations beyond the limit": excess})
    return Derivation("round trip, free memory, round trip", instance.with_stage_0(rank), terms, memory)


def _passes(instance: Instance, stages: Sequence[int]) -> tuple[tuple[str, float], ...]:
    return tuple((kind, instance.items.sum(name, stages)) for kind, name in zip("FBW", COST_LISTS[:3], strict=True))


def _idle_ends(instance: Instance, stages: Sequence[int]) -> tuple[float, float]:
    """Unavoidable idle time of one rank before its first B and after its last F."""
    items, paths, limit = instance.items, instance.paths, instance.limit
    first, last = stages[0], stages[-1]
    # From the first F of the rank to the start of its first B, which is of its last stage.
    until_backward = paths.down_to(last) - paths.down_to(first) + paths.there_and_back(last) - paths.backward_ms[last]
    fitting = instance.most_in_flight(stages)
    forwards = _most(items.of(stages, "forward_ms", "activation"), limit)
    if fitting:
        forwards = min(forwards, fitting * max(paths.forward_ms[s] for s in stages))
    # From the end of the rank's last F to the end of its last W, both of the last microbatch.
    until_end = (
        paths.there_and_back(first)
        - (paths.down_to(last) - paths.down_to(first))
        - paths.forward_ms[last]
        + paths.wgrad_ms[first]
    )
    return max(0.0, until_backward - forwards), max(0.0, until_end - _most_left(instance, stages))


def _most_left(instance: Instance, stages: Sequence[int]) -> float:
    """The most time of the B and W left after the last F, whose memory fits the limit; whole passes if all are alike."""
    limit, parts = instance.limit, instance.items.parts
    alike = instance.alike(stages)
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


def _most(items: Sequence[tuple[float, float, int]], limit: float) -> float:
    """The most time that (time, memory, count) items can take within a memory limit; the last item is counted in part."""
    total, headroom = 0.0, limit
    for time, memory, count in sorted(items, key=lambda item: item[0] / item[1] if item[1] > 0 else math.inf, reverse=True):
        share = count if memory <= 0 or count * memory <= headroom else max(0.0, headroom) / memory
        total += share * time
        headroom -= share * memory
    return total


def _pending(stages: Sequence[int], items: Items) -> list[tuple[float, float, int]]:
    """(time, memory, count) of the Ws that may be left after the last B; that of a fused BW holds the activations instead."""
    return [
        (costs.wgrad_ms[s], min(costs.activation[s], costs.activation_after_backward[s]), count)
        for costs, count in items.parts
        for s in stages
    ]
