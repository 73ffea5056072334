"""Which stage should hold how many layers, so that no rank has more to do than it must.

The embedding and the head make the first and the last stage slower than the others. With the measured times of a layer and of
these two parts, layers move to where there is time for them.
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
    """What a layout is judged by: the smaller, the better, and the rank counts before the stage."""

    busiest_rank_ms: float
    """F, B and W of one microbatch through all stages of the rank that takes longest. In the steady state of any schedule a
    microbatch costs at least this."""
    slowest_stage_ms: float
    """The same of the stage that takes longest. Under one rank's load, even stages leave the schedule smaller bubbles."""


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """What the parts of a model take: F, B and W of one microbatch together, in milliseconds. All layers count as alike."""

    layer_ms: float
    """One decoder layer; more than 0."""
    embedding_ms: float = 0.0
    """What the first stage has to do beside its layers."""
    head_ms: float = 0.0
    """What the last stage has to do beside its layers: final norm, head and loss."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0) or (name == "layer_ms" and value == 0):
                allowed = "more than 0" if name == "layer_ms" else "0 or more"
                raise ConfigError(f"{name} is {value}; it must be a finite number, {allowed}")

    def stages_ms(self, layers: StageLayers) -> list[float]:
        """The time of each stage of a layout."""
        extra = self.extras_ms(layers.num_stages)
        return [extra[stage] + count * self.layer_ms for stage, count in enumerate(layers.per_stage)]

    def load(self, layers: StageLayers, placement: Placement) -> StageLoad:
        """How busy a layout makes ranks and stages."""
        times = self.stages_ms(layers)
        return StageLoad(
            busiest_rank_ms=max(math.fsum(times[stage] for stage in stages) for stages in placement.rank_to_stages),
            slowest_stage_ms=max(times),
        )

    @staticmethod
    def from_stages(stages_ms: Sequence[float], layers: StageLayers) -> PartTimes:
        """What the parts take, from what the stages that hold them take.

        A layer is the median of the stages that hold nothing but layers, and what the first and the last stage take beyond their
        layers is the embedding and the head. Two stages cannot tell all three apart: then the one that takes less per layer
        counts as layers only.

        Args:
            stages_ms: F, B and W of one microbatch, per stage.
            layers: which layers those stages hold; at least one in all.
        """
        last = layers.num_stages - 1
        per_layer = [time / count if count else math.inf for time, count in zip(stages_ms, layers.per_stage, strict=True)]
        layer = median(per_layer[1:last]) if last > 1 else min(per_layer)

        def beyond(stage: int) -> float:
            return max(0.0, stages_ms[stage] - layers.per_stage[stage] * layer)

        return PartTimes(layer_ms=layer, embedding_ms=beyond(0), head_ms=beyond(last))

    def extras_ms(self, num_stages: int) -> list[float]:
        """What each of so many stages has to do beside its layers."""
        extra = [0.0] * num_stages
        extra[0] += self.embedding_ms
        extra[-1] += self.head_ms
        return extra


def balance(num_layers: int, placement: Placement, times: PartTimes) -> StageLayers:
    """The layout with the smallest `StageLoad`: first of all the busiest rank, then the slowest stage. Exact.

    Neither memory nor links count, nor how well a schedule's order of passes fits the stages.

    Layers are alike, so dealing them out one by one, always to where the time is then smallest, minimises the largest time; first
    over ranks, which says how many layers each may hold at most, then over stages within these limits. (A limit per rank is a
    laminar constraint, under which such greedy choices stay optimal.) Equal choices go to the less busy rank, then to the earlier
    stage.

    Args:
        num_layers: decoder layers of the model.
        placement: stage -> rank.
        times: of the model's parts.

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
        has_room = [stage for stage, rank in enumerate(placement.stage_to_rank) if ranks[rank].num_layers < most[rank]]
        chosen = min(has_room, key=after)
        stages[chosen].num_layers += 1
        ranks[placement.stage_to_rank[chosen]].num_layers += 1
    return StageLayers(per_stage=tuple(share.num_layers for share in stages))


@dataclass
class _Share:
    """What a stage or a rank has been dealt so far. Changes with every layer."""

    num_layers: int
    extra_ms: float
    """Of the embedding and the head, where it holds them."""

    def with_one_more(self, layer_ms: float) -> float:
        """Its time in milliseconds once it has been dealt another layer."""
        return self.extra_ms + (self.num_layers + 1) * layer_ms


def _most_per_rank(num_layers: int, ranks: Sequence[_Share], layer_ms: float) -> list[int]:
    """How many layers each rank may hold when the busiest one is to be no busier than it must be.

    Args:
        num_layers: still to be dealt.
        ranks: what they hold already. Not changed.
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
