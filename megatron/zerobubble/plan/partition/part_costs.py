"""Costs of a model's parts, from which the costs of stages that were never measured are predicted.

The costs of a layer, the embedding and the head follow from the measurement of one placement; from these follow the costs of any
other placement and layout of the same model on the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.balance import PartTimes
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["PartCosts"]

_KINDS = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """Costs of a model's parts: times and activation memory, in the units of `CostModel`."""

    by_kind: Mapping[str, PartTimes]
    """Field of `CostModel` -> its values for the parts, in its unit. Fields that are 0 in every stage are left out."""
    comm_ms: float
    """P2P latency per message in milliseconds."""
    links: Links | None = None
    """Links of unequal speed between the ranks, which are the same in any placement; None: `comm_ms` for all."""

    @staticmethod
    def from_stages(costs: CostModel, layers: StageLayers) -> PartCosts:
        """From the costs of stages with these `layers`; it takes three stages to separate all parts (`PartTimes.from_stages`)."""
        parts = {kind: PartTimes.from_stages(getattr(costs, kind), layers) for kind in _KINDS if any(getattr(costs, kind))}
        return PartCosts(by_kind=parts, comm_ms=costs.comm_ms, links=costs.links)

    def costs(self, layers: StageLayers) -> CostModel:
        """The costs of stages with these `layers`, on the same number of ranks."""
        nothing = (0.0,) * layers.num_stages
        stages = {kind: tuple(self.by_kind[kind].stages_ms(layers)) if kind in self.by_kind else nothing for kind in _KINDS}
        return replace(CostModel.of_lists(stages, comm_ms=self.comm_ms), links=self.links)

    def costs_of(self, layers_of: Callable[[Placement], StageLayers]) -> Callable[[Placement], CostModel]:
        """The costs of other placements of the same model, as the planner asks for them: it raises PlanError for some.

        Args:
            layers_of: divides the layers over the stages of a placement; raises ConfigError where they cannot be divided.
        """

        def costs_of(placement: Placement) -> CostModel:
            try:
                return self.costs(layers_of(placement))
            except ConfigError as error:
                raise PlanError(f"{placement.num_stages} stages: {error}") from None

        return costs_of
