"""Partitions of a chain of layers into the stages of a placement: good ones by local search, for the planner to try.

A partition is scored without planning: by the work of the bottleneck rank, which any order pays for every microbatch; then by how
evenly work is divided, because even stages lead to smaller bubbles; and by ranks that cannot hold the microbatches in flight that
a schedule wants. How these count against each other depends on the schedule, so several weights give several partitions.

A move takes one layer from a stage to another one; the stages in between pass one layer on. Starts have the same work per stage.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from random import Random

from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.layer_costs import Model

__all__ = ["partitions"]

_STARTS = 3
_WISHES = tuple(itertools.product((0.0, 0.1, 0.5), (0.0, 0.5, 1.0)))
"""What a partition should be like beside little work on the bottleneck rank, which has weight 1: the weight of the slowest stage,
and the microbatches that every rank should be able to hold, as a multiple of p; rank r of a linear placement (p-r)/p of it. Each
leads to a partition that is best for some model, schedule and memory."""


def partitions(
    model: Model,
    placement: Placement,
    *,
    memory_bytes: float | None = None,
    allow_empty: bool = True,
    seed: int = 0,
) -> list[tuple[int, ...]]:
    """Good partitions, each once, as layers per stage; the one with the least work on its bottleneck rank comes first.

    Args:
        model: the layers.
        placement: stage -> rank.
        memory_bytes: memory of one device; None: no limit.
        allow_empty: whether stages other than the first and the last can have no layer.
        seed: of the random starts.

    Returns:
        Possibly none, if there are fewer layers than stages that need one.
    """
    least = [int(not allow_empty and 0 < stage < placement.num_stages - 1) for stage in range(placement.num_stages)]
    if sum(least) > model.num_layers:
        return []
    found: dict[tuple[int, ...], tuple[float, float]] = {}
    random = Random(seed)
    for wish in _WISHES if memory_bytes is not None else _WISHES[::3]:
        score = _Score(model, placement, wish, memory_bytes)
        for start in _starts(score, least, random):
            counts = _descend(score, list(start), least)
            found.setdefault(tuple(counts), (score.bottleneck_ms(counts), score(counts)))
    return [counts for counts, _ in sorted(found.items(), key=lambda item: (item[1], item[0]))]


class _Score:
    """The score of a partition, in milliseconds: smaller is better."""

    def __init__(self, model: Model, placement: Placement, wish: tuple[float, float], memory_bytes: float | None) -> None:
        sums = model.sums
        names = ("forward_ms", "backward_ms", "wgrad_ms")
        self.work = [math.fsum(parts) for parts in zip(*(sums[name] for name in names), strict=True)]
        self.placement, self.num_layers = placement, model.num_layers
        self.ends = [0.0] * placement.num_stages
        self.ends[0] += model.first.work_ms
        self.ends[-1] += model.last.work_ms
        self._evenness, in_flight = wish
        self._memory = memory_bytes
        p = placement.num_ranks
        is_linear = placement.num_stages == p
        self._in_flight = [max(1.0, in_flight * (p - rank if is_linear else p)) for rank in range(p)]
        self._static, self._activation = sums["static_bytes"], sums["activation_bytes"]
        self._held = [0.0] * p
        for rank, part in ((0, model.first), (placement.stage_to_rank[-1], model.last)):
            self._held[rank] += part.static_bytes + self._in_flight[rank] * part.activation_bytes
        self.mean_ms = (self.work[-1] + math.fsum(self.ends)) / p

    def stages_ms(self, counts: Sequence[int]) -> list[float]:
        """Work per stage."""
        ends = [0, *itertools.accumulate(counts)]
        return [self.work[b] - self.work[a] + extra for (a, b), extra in zip(itertools.pairwise(ends), self.ends, strict=True)]

    def ranks_ms(self, stages: Sequence[float]) -> list[float]:
        """Work per rank."""
        loads = [0.0] * self.placement.num_ranks
        for rank, time in zip(self.placement.stage_to_rank, stages, strict=True):
            loads[rank] += time
        return loads

    def bottleneck_ms(self, counts: Sequence[int]) -> float:
        """Work of the rank with the most."""
        return max(self.ranks_ms(self.stages_ms(counts)))

    def sources(self, counts: Sequence[int]) -> list[int]:
        """Stages with too much work or memory: the slowest, those of the bottleneck rank, and of the fullest rank."""
        stages = self.stages_ms(counts)
        loads = self.ranks_ms(stages)
        ranks = {loads.index(max(loads))}
        if self._memory is not None:
            held = self._held_bytes(counts)
            ranks.add(held.index(max(held)))
        chosen = [stage for rank in sorted(ranks) for stage in self.placement.rank_to_stages[rank]]
        return [*chosen, stages.index(max(stages))]

    def targets(self, counts: Sequence[int]) -> list[int]:
        """Stages of the ranks with little work, the fastest stage of each rank first."""
        stages = self.stages_ms(counts)
        loads = self.ranks_ms(stages)
        ranks = sorted(range(len(loads)), key=loads.__getitem__)[: max(3, len(loads) // 4)]
        chosen = [stage for rank in ranks for stage in self.placement.rank_to_stages[rank]]
        return sorted(chosen, key=lambda stage: (stages[stage], stage))

    def __call__(self, counts: Sequence[int]) -> float:
        stages = self.stages_ms(counts)
        loads = self.ranks_ms(stages)
        spread = math.sqrt(sum(load * load for load in loads) / len(loads))
        score = max(loads) + 0.01 * spread + self._evenness * max(stages) + 1e-3 * math.sqrt(sum(time * time for time in stages))
        return score if self._memory is None else score + self._excess(counts)

    def _excess(self, counts: Sequence[int]) -> float:
        """A penalty for the share of the device memory by which ranks exceed it."""
        assert self._memory is not None
        return 10.0 * self.mean_ms * sum(max(0.0, one / self._memory - 1.0) for one in self._held_bytes(counts))

    def _held_bytes(self, counts: Sequence[int]) -> list[float]:
        """Per rank, static bytes and the activations of the microbatches in flight."""
        held = list(self._held)
        at = 0
        for rank, count in zip(self.placement.stage_to_rank, counts, strict=True):
            end = at + count
            held[rank] += self._static[end] - self._static[at]
            held[rank] += self._in_flight[rank] * (self._activation[end] - self._activation[at])
            at = end
        return held


def _starts(score: _Score, least: Sequence[int], random: Random) -> Iterator[list[int]]:
    """Partitions with the same work per rank, divided over its stages evenly or at random."""
    placement = score.placement
    parts = [len(placement.rank_to_stages[rank]) for rank in placement.stage_to_rank]
    for attempt in range(_STARTS):
        shares = [1.0 / part * (1.0 if attempt == 0 else random.uniform(0.5, 1.5)) for part in parts]
        wanted = list(itertools.accumulate(score.mean_ms * share for share in shares))
        scale = (score.work[-1] + math.fsum(score.ends)) / wanted[-1]
        cuts = []
        for stage, target in enumerate(wanted[:-1]):
            goal = target * scale - math.fsum(score.ends[: stage + 1])
            at = bisect.bisect_left(score.work, goal)
            if at > 0 and (at > score.num_layers or goal - score.work[at - 1] < score.work[at] - goal):
                at -= 1
            cuts.append(min(at, score.num_layers))
        counts = [b - a for a, b in itertools.pairwise([0, *itertools.accumulate(cuts, max), score.num_layers])]
        yield _with_least(counts, least)


def _with_least(counts: list[int], least: Sequence[int]) -> list[int]:
    """The counts with layers moved, from the largest stage each, until every stage has its least."""
    for stage, need in enumerate(least):
        while counts[stage] < need:
            donor = max(range(len(counts)), key=lambda other: counts[other] - least[other])
            counts[donor] -= 1
            counts[stage] += 1
    return counts


def _descend(score: _Score, counts: list[int], least: Sequence[int]) -> list[int]:
    """Move layers from where there is too much to where there is little, until no such move helps."""
    best = score(counts)
    while True:
        for source, target in itertools.product(score.sources(counts), score.targets(counts)):
            if source == target or counts[source] == least[source]:
                continue
            counts[source] -= 1
            counts[target] += 1
            value = score(counts)
            if value < best - 1e-12 * best:
                best = value
                break
            counts[source] += 1
            counts[target] -= 1
        else:
            return counts
