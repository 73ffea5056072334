"""Memory times time in whole passes, for ranks whose passes all take the same memory (`memory_time` is for the others).

Draw over time how many passes of a rank are in flight, from the start of an F to the end of its B. The area under the curve is at
least the sum over all passes of the shortest time from F to B. It is at most the number that fits the memory times the time,
less what is certainly missing while the rank runs

- the k-th F: at most k passes are in flight;
- the j-th last B: at most j, because each of them still needs one;
- a W: at most as many as fit beside what that W keeps, which often is one less. During the W of the j-th last B it is at most
  j - 1, if that W is in the time that is bounded.

A rank runs one op at a time, so these add up. A fused BW keeps its own pass in flight during its W, which counts for as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zerobubble.plan.bounds.instance import Derivation, Instance
from megatron.zerobubble.plan.costs.microbatch_costs import COST_LISTS


def passes_in_flight(instance: Instance, rank: int, stages: Sequence[int]) -> Derivation:
    """Over the rank's own time, from its first op to its last."""
    count = _Count(instance, stages)
    last = (count.most * (count.most + 1) / 2 - count.most * count.beside) * count.wgrad_ms
    terms = count.terms(count.beside * count.wgrads_ms, ("missing during the last W", last))
    return Derivation("passes in flight times time", (rank,), terms, count.memory())


def travel_passes_travel(instance: Instance, rank: int, stages: Sequence[int]) -> Derivation:
    """From the rank's first F to its last B, and before and after it the travel of the first F and of the last gradient.

    Only W whose memory fits the limit together are left for later.
    """
    count, paths = _Count(instance, stages), instance.paths
    terms = (
        ("microbatch 0 to the rank", paths.down_to(stages[0])),
        *count.terms(count.beside * max(0.0, count.wgrads_ms - count.pending_ms)),
        ("the last gradient back to stage 0, with its W", paths.back_from(stages[0])),
    )
    return Derivation("travel, passes in flight times time, travel", instance.with_stage_0(rank), terms, count.memory())


class _Count:
    """How many passes of a rank fit its memory, and the least that they take."""

    def __init__(self, instance: Instance, stages: Sequence[int]) -> None:
        alike = instance.alike(stages, COST_LISTS[3:])
        assert alike is not None
        costs, stage, total = alike
        self._forward_ms = min(costs.forward_ms[s] for s in stages)
        self._backward_ms = min(costs.backward_ms[s] for s in stages)
        self.wgrad_ms = min(costs.wgrad_ms[s] for s in stages)
        self.wgrads_ms = instance.items.sum("wgrad_ms", stages)
        self.most = instance.most_in_flight(stages)
        kept = costs.activation_after_backward[stage]
        self._most_beside = instance.most_in_flight(stages, kept)
        self.beside = min(1, self.most - self._most_beside)
        pending = min(kept, costs.activation[stage])  # a fused BW whose W is left still holds its activations
        most_pending = total if pending * total <= instance.limit else instance.limit / pending
        self.pending_ms = most_pending * max(costs.wgrad_ms[s] for s in stages)
        self._area = total / len(stages) * math.fsum(instance.paths.there_and_back(s) for s in stages)
        self._instance = instance

    def terms(self, during_wgrads: float, *more: tuple[str, float]) -> tuple[tuple[str, float], ...]:
        """The area and what is missing, over the most in flight."""
        steps = self.most * (self.most - 1) / 2
        areas = (
            ("passes from F to B", self._area),
            ("missing during the first F", steps * self._forward_ms),
            ("missing during the last B", steps * self._backward_ms),
            ("missing during W", during_wgrads),
            *more,
        )
        return tuple((f"{name}, over the most in flight", area / self.most) for name, area in areas)

    def memory(self) -> tuple[tuple[str, float], ...]:
        """The memory that went into the terms."""
        most = {"most passes in flight": float(self.most), "most beside a W": float(self._most_beside)}
        return self._instance.memory(**most)
