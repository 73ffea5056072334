"""Costs of a model's parts, from which the costs of stages that were never measured are predicted.

The costs of a layer, the embedding and the head follow from the measurement of one placement; from these follow the costs of any
other placement and layout of the same model on the same ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["PartCosts", "PartTimes"]

_KINDS = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")


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
        times = [count * self.layer_ms for count in layers.per_stage]
        times[0] += self.embedding_ms
        times[-1] += self.head_ms
        return times

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


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """Costs of a model's parts: times and activation memory, in the units of `CostModel`."""

    by_kind: Mapping[str, PartTimes]
    """Field of `CostModel` -> its values for the parts, in its unit. Fields that are 0 in every stage are left out."""
    comm_ms: float
    """P2P latency per message in milliseconds."""

    @staticmethod
    def from_stages(costs: CostModel, layers: StageLayers) -> PartCosts:
        """From the costs of stages with these `layers`; it takes three stages to separate all parts (`PartTimes.from_stages`)."""
        parts = {kind: PartTimes.from_stages(getattr(costs, kind), layers) for kind in _KINDS if any(getattr(costs, kind))}
        return PartCosts(by_kind=parts, comm_ms=costs.comm_ms)

    def costs(self, layers: StageLayers) -> CostModel:
        """The costs of stages with these `layers`, on the same number of ranks."""
        nothing = (0.0,) * layers.num_stages
        stages = {kind: tuple(self.by_kind[kind].stages_ms(layers)) if kind in self.by_kind else nothing for kind in _KINDS}
        return CostModel.of_lists(stages, comm_ms=self.comm_ms)
