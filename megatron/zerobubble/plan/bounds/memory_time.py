"""Memory times time, for ranks whose passes take unequal memory (`in_flight` counts passes where they are alike).

Draw over time the memory of a rank's activations between F and B. The area under the curve is at least what every microbatch
occupies in the shortest time from its F to its B. It is at most the limit times the time, less what is certainly missing while
the rank runs its first F, which have yet to fill the memory; its last B, which empty it; and a W, for what that W keeps. A rank
runs one op at a time, so these add up.

Instead of the part kept for W during W, a fused BW holds the activations of its stage for so long, and with them those of the
rank's earlier stages, whose B come later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron.zerobubble.plan.bounds.instance import Derivation, Instance


def memory_times_time(instance: Instance, rank: int, stages: Sequence[int]) -> Iterator[Derivation]:
    """Two bounds. One over the rank's own time, from its first op to its last.

    The other from the rank's first F to its last B, and before and after it the travel of the first F and of the last gradient.
    Only W whose memory fits the limit together are left for later.
    """
    areas = _areas(instance, stages)
    yield Derivation("memory times time", (rank,), _over_the_limit(instance, areas), instance.memory())
    longest = max(time for time, _, _ in instance.items.of(stages, "wgrad_ms", "activation"))
    areas["missing during W"] = max(0.0, areas["missing during W"] - longest * instance.limit)
    terms = (
        ("microbatch 0 to the rank", instance.paths.down_to(stages[0])),
        *_over_the_limit(instance, areas),
        ("the last gradient back to stage 0, with its W", instance.paths.back_from(stages[0])),
    )
    yield Derivation("travel, memory times time, travel", instance.with_stage_0(rank), terms, instance.memory())


def _areas(instance: Instance, stages: Sequence[int]) -> dict[str, float]:
    """Memory times milliseconds that all microbatches occupy at least, and that are missing below the limit."""
    between, during = [], []
    for costs, count in instance.items.parts:
        earlier = 0.0
        for s in stages:
            earlier += costs.activation[s]
            between.append(count * costs.activation[s] * instance.paths.there_and_back(s))
            during.append(count * min(costs.activation_after_backward[s], earlier) * costs.wgrad_ms[s])
    return {
        "activations from F to B": math.fsum(between),
        "missing during the first F": _missing(instance, stages, "forward_ms"),
        "missing during the last B": _missing(instance, stages, "backward_ms"),
        "missing during W": math.fsum(during),
    }


def _missing(instance: Instance, stages: Sequence[int], times: str) -> float:
    """Area below the limit while ops that take so long fill or empty the memory.

    After t milliseconds of F the activations are at most the largest plus t times the most that any F allocates per millisecond;
    the same with the milliseconds of B that are left.
    """
    ops = [(time, memory) for time, memory, _ in instance.items.of(stages, times, "activation") if memory > 0]
    rate = max((memory / time if time > 0 else math.inf for time, memory in ops), default=math.inf)
    missing = instance.limit - max((memory for _, memory in ops), default=math.inf)
    if missing <= 0 or not math.isfinite(rate):
        return 0.0
    length = min(missing / rate, instance.items.sum(times, stages))
    return missing * length - rate * length * length / 2


def _over_the_limit(instance: Instance, areas: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple((f"{name}, over the limit", area / instance.limit) for name, area in areas.items())
