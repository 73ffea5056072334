"""Balance layers over stages so that the bottleneck rank has the least work.

The embedding and the head make the first and the last stage slower than the others. Given the measured times of a layer and of
these two parts, layers move to the faster stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["PartTimes", "StageLoad", "balance"]


@dataclass(frozen=True, kw_only=True, order=True)
class StageLoad:
    """The score of a layout: smaller is better; the rank is compared before the stage."""

    bottleneck_rank_ms: float
    """F, B and W of one microbatch through all stages of the bottleneck rank. In the steady state of any schedule a microbatch
    costs at least this."""
    slowest_stage_ms: float
    """F, B and W of one microbatch through the slowest stage. With the same rank load, even stages lead to smaller bubbles."""


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Times of the model's parts: F, B and W of one microbatch together, in milliseconds. All layers take the same time."""

    layer_ms: float
    """One decoder layer; more than 0."""
    embedding_ms: float = 0.0
    """The embedding: the first stage's time beyond its layers."""
    head_ms: float = 0.0
    """Final norm, head and loss: the last stage's time beyond its layers."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0) or (name == "layer_ms" and value == 0):
                allowed = "more than 0" if name == "layer_ms" else "0 or more"
                raise ConfigError(f"{name} is {value}; it must be a finite number, {allowed}")

    def stages_ms(self, layers: StageLayers) -> list[float]:
        """The time of each stage of a layout, in milliseconds."""
        extra = self.extras_ms(layers.num_stages)
        return [extra[stage] + count * self.layer_ms for stage, count in enumerate(layers.per_stage)]

    def load(self, layers: StageLayers, placement: Placement) -> StageLoad:
        """The load of the bottleneck rank and of the slowest stage under a layout."""
        times = self.stages_ms(layers)
        return StageLoad(
            bottleneck_rank_ms=max(math.fsum(times[stage] for stage in stages) for stages in placement.rank_to_stages),
            slowest_stage_ms=max(times),
        )

    @staticmethod
    def from_stages(stages_ms: Sequence[float], layers: StageLayers) -> PartTimes:
        """Times of the parts, derived from times of stages.

        A layer takes the median over the stages with nothing but layers; the time of the first and the last stage beyond their
        layers is the embedding and the head. Two stages cannot distinguish all three: then the one with less time per layer is
        assumed to have layers only.

        Args:
            stages_ms: F, B and W of one microbatch, per stage, in milliseconds.
            layers: the layers of those stages; at least one in all.
        """
        last = layers.num_stages - 1
        per_layer = [time / count if count else math.inf for time, count in zip(stages_ms, layers.per_stage, strict=True)]
        inner = [time for time in per_layer[1:last] if math.isfinite(time)]
        layer = median(inner) if inner else min(per_layer)

        def beyond(stage: int) -> float:
            return max(0.0, stages_ms[stage] - layers.per_stage[stage] * layer)

        return PartTimes(layer_ms=layer, embedding_ms=beyond(0), head_ms=beyond(last))

    def extras_ms(self, num_stages: int) -> list[float]:
        """Per stage, the time of the embedding and the head, in milliseconds."""
        extra = [0.0] * num_stages
        extra[0] += self.embedding_ms
        extra[-1] += self.head_ms
        return extra


def balance(num_layers: int, placement: Placement, times: PartTimes) -> StageLayers:
    """The layout with the smallest `StageLoad`: minimize the bottleneck rank's time, then the slowest stage's. Exact.

    It ignores memory, links, and how well a schedule's order fits the stages.

    Layers are identical, so assigning them one by one, always where the resulting time is smallest, minimizes the largest time:
    first over ranks, which gives the most layers per rank, then over stages within these limits. (A limit per rank is a laminar
    constraint, under which such greedy choices stay optimal.) Ties go to the less loaded rank, then to the earlier stage.

    Args:
        num_layers: decoder layers of the model.
        placement: stage -> rank.
        times: times of the model's parts.

    Raises:
        ConfigError: there are fewer layers than stages that need one.
    """
    least = [int(0 < stage < placement.num_stages - 1) for stage in range(placement.num_stages)]
    left = num_layers - sum(least)
    if left < 0:
        raise ConfigError(
            f"{num_layers} layers are too few for {placement.num_stages} stages: all but the first and the last need one, "
            f"{sum(least)} in all"
        )
    extras = times.extras_ms(placement.num_stages)
    stages = [_Share(num_layers=count, extra_ms=extra) for count, extra in zip(least, extras, strict=True)]
    ranks = [
        _Share(num_layers=sum(least[stage] for stage in row), extra_ms=math.fsum(extras[stage] for stage in row))
        for row in placement.rank_to_stages
    ]
    most = _most_per_rank(left, ranks, times.layer_ms)

    def after(stage: int) -> tuple[float, float]:
        rank = placement.stage_to_rank[stage]
        return stages[stage].with_one_more(times.layer_ms), ranks[rank].with_one_more(times.layer_ms)

    for _ in range(left):
        allowed = [stage for stage, rank in enumerate(placement.stage_to_rank) if ranks[rank].num_layers < most[rank]]
        chosen = min(allowed, key=after)
        stages[chosen].num_layers += 1
        ranks[placement.stage_to_rank[chosen]].num_layers += 1
    return StageLayers(per_stage=tuple(share.num_layers for share in stages))


@dataclass
class _Share:
    """Layers assigned to a stage or a rank so far. Mutable."""

    num_layers: int
    extra_ms: float
    """Time of the embedding and the head, if it has them."""

    def with_one_more(self, layer_ms: float) -> float:
        """Its time in milliseconds with one more layer."""
        return self.extra_ms + (self.num_layers + 1) * layer_ms


def _most_per_rank(num_layers: int, ranks: Sequence[_Share], layer_ms: float) -> list[int]:
    """The most layers of each rank such that the bottleneck rank's time is minimal.

    Args:
        num_layers: layers still to be assigned.
        ranks: layers assigned so far; not changed.
        layer_ms: time of one layer.
    """
    dealt = [replace(share) for share in ranks]
    for _ in range(num_layers):
        min(dealt, key=lambda share: share.with_one_more(layer_ms)).num_layers += 1
    busiest_ms = max(share.extra_ms + share.num_layers * layer_ms for share in dealt)
    for share in dealt:
        while share.with_one_more(layer_ms) <= busiest_ms:
            share.num_layers += 1
    return [share.num_layers for share in dealt]
