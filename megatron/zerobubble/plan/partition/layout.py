"""A layout: which layers each stage has, and which rank has the stage; its costs, and the memory limit in the planner's units.

A planner's memory limit is one number for all ranks, while ranks with unequal weights have unequal headroom. So the activations
of every rank are counted in shares of its own headroom: scaled by (smallest headroom / headroom of the rank), one limit holds
for all ranks exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["Layout", "StageCosts", "costs_of_placements"]

_LISTS = ("forward_ms", "backward_ms", "wgrad_ms", "activation_bytes", "after_backward_bytes")
"""`COST_LISTS` by the names of `LayerCosts`."""


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What the planner needs for one layout on devices of one size."""

    costs: CostModel
    """Activations in shares of the rank's headroom, scaled to the rank with the smallest."""
    memory_limit: float | None
    """Most activation memory per rank; 1.0 is min(p, m) microbatches of the model's mean activation memory per rank."""
    bytes_per_unit: tuple[float, ...]
    """Per rank, the bytes that 1.0 of the memory limit stands for."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A partition of a model's layers into stages, and the placement of the stages."""

    model: Model
    placement: Placement
    per_stage: tuple[int, ...]
    """Decoder layers of every stage; stages can be empty."""

    def __post_init__(self) -> None:
        if len(self.per_stage) != self.placement.num_stages or sum(self.per_stage) != self.model.num_layers:
            raise ConfigError(
                f"{len(self.per_stage)} stages with {sum(self.per_stage)} layers in all do not fit a model of "
                f"{self.model.num_layers} layers on {self.placement.num_stages} stages"
            )

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The number of layers up to and including every stage, after a leading 0."""
        return (0, *itertools.accumulate(self.per_stage))

    def stages(self, name: str) -> list[float]:
        """A field of `LayerCosts` per stage, with the embedding and the head."""
        values = [self.model.sums[name][end] - self.model.sums[name][begin] for begin, end in itertools.pairwise(self.ends)]
        values = [max(0.0, value) if count else 0.0 for value, count in zip(values, self.per_stage, strict=True)]
        values[0] += getattr(self.model.first, name)
        values[-1] += getattr(self.model.last, name)
        return values

    def ranks(self, name: str) -> list[float]:
        """A field of `LayerCosts` per rank."""
        values = self.stages(name)
        return [math.fsum(values[stage] for stage in stages) for stages in self.placement.rank_to_stages]

    @cached_property
    def bottleneck_ms(self) -> float:
        """F, B and W of one microbatch on the rank with the most work."""
        return max(map(math.fsum, zip(*(self.ranks(name) for name in ("forward_ms", "backward_ms", "wgrad_ms")), strict=True)))

    @property
    def text(self) -> str:
        """The layout text for `--pipeline-model-parallel-layout`, or for a hybrid model the `--hybrid-layer-pattern`."""
        if self.model.is_hybrid:
            return "|".join(self.model.letters(begin, end) for begin, end in itertools.pairwise(self.ends))
        return StageLayers(per_stage=self.per_stage).text

    @property
    def flag(self) -> str:
        """The flag that takes `text`."""
        return "--hybrid-layer-pattern" if self.model.is_hybrid else "--pipeline-model-parallel-layout"

    def stage_costs(self, num_microbatches: int, memory_bytes: float | None) -> StageCosts:
        """The planner's costs and memory limit.

        Args:
            num_microbatches: m.
            memory_bytes: memory of one device; None: no limit.

        Raises:
            ConfigError: the weights, gradients and optimizer state of a rank leave nothing for activations.
        """
        p = self.placement.num_ranks
        unit = (self.model.total.activation_bytes / p or 1.0) * min(p, num_microbatches)
        shares, limit = [1.0] * p, None
        if memory_bytes is not None:
            headroom = [memory_bytes - static for static in self.ranks("static_bytes")]
            least = min(headroom)
            if least <= 0:
                raise ConfigError(
                    f"rank {headroom.index(least)} has {(memory_bytes - least) / 2**30:.2f} GiB of weights, gradients and "
                    f"optimizer state; the device has {memory_bytes / 2**30:.2f} GiB"
                )
            shares, limit = [least / one for one in headroom], least / unit
        scale = [shares[rank] * min(p, num_microbatches) / unit for rank in self.placement.stage_to_rank]
        costs = self.costs(scale)
        return StageCosts(costs=costs, memory_limit=limit, bytes_per_unit=tuple(unit / share for share in shares))

    def costs(self, scale: Sequence[float] | None = None) -> CostModel:
        """Costs of the stages, with the model's bytes times a factor per stage, by default 1, as activation memory."""
        lists = dict(zip(COST_LISTS, map(self.stages, _LISTS), strict=True))
        for name in COST_LISTS[3:]:
            lists[name] = [value * factor for value, factor in zip(lists[name], scale or (1.0,) * len(lists[name]), strict=True)]
        return CostModel.of_lists(lists, comm_ms=self.model.comm_ms)

    def peak_bytes(self, stage_costs: StageCosts, peak_memory: Sequence[float]) -> list[float]:
        """Per rank, the bytes of a plan's peak activation memory and of weights, gradients and optimizer state."""
        used = zip(self.ranks("static_bytes"), stage_costs.bytes_per_unit, peak_memory, strict=True)
        return [static + unit * peak for static, unit, peak in used]


def costs_of_placements(
    model: Model, layers_of: Callable[[Placement], StageLayers], measured: CostModel
) -> Callable[[Placement], CostModel]:
    """The costs of other placements of a measured model, as the planner asks for them: it raises PlanError for some.

    Args:
        model: with the units of activation memory of a `CostModel` in place of bytes.
        layers_of: divides the layers over the stages of a placement; raises ConfigError where they cannot be divided.
        measured: the costs that the model was made from, whose links and all-to-alls of experts are the same in any placement.
    """
    alike = {name: getattr(measured, name) for name in ("links", "all_to_all", "wgrad_beside")}

    def costs_of(placement: Placement) -> CostModel:
        try:
            layout = Layout(model=model, placement=placement, per_stage=layers_of(placement).per_stage)
            return CostModel.of(layout.costs().table, comm_ms=model.comm_ms, **alike)
        except ConfigError as error:
            raise PlanError(f"{placement.num_stages} stages: {error}") from None

    return costs_of
