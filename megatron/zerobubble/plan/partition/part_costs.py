"""Costs of a model's parts, and what follows for stages that nobody has run yet.

One placement was measured; what a layer, the embedding and the head cost follows from it, and from these the costs of any other
placement and layout of the same model on the same ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.partition.balance import PartTimes
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["PartCosts"]

_KINDS = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """What the parts of a model cost: times and memory, each as of `CostModel`."""

    by_kind: Mapping[str, PartTimes]
    """Field of `CostModel` -> what the parts have of it, in its unit. Kinds of which nothing was measured are left out."""
    comm_ms: float
    """Time of a link."""

    @staticmethod
    def from_stages(costs: CostModel, layers: StageLayers) -> PartCosts:
        """From the costs of stages that hold `layers`; at least three of them tell all parts apart (`PartTimes.from_stages`)."""
        parts = {kind: PartTimes.from_stages(getattr(costs, kind), layers) for kind in _KINDS if any(getattr(costs, kind))}
        return PartCosts(by_kind=parts, comm_ms=costs.comm_ms)

    def costs(self, layers: StageLayers) -> CostModel:
        """Of stages that hold `layers`, on the same number of ranks."""
        nothing = (0.0,) * layers.num_stages
        stages = {kind: tuple(self.by_kind[kind].stages_ms(layers)) if kind in self.by_kind else nothing for kind in _KINDS}
        return CostModel(**stages, comm_ms=self.comm_ms)
