"""The parts of a model from its stages, and from these the costs of another placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import costs_of_placements
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

LAYER = {"forward_ms": 2.0, "backward_ms": 3.0, "wgrad_ms": 1.5, "activation": 0.2, "activation_after_backward": 0.1}
EMBEDDING = {"forward_ms": 0.5, "backward_ms": 0.25, "wgrad_ms": 0.0, "activation": 0.01, "activation_after_backward": 0.0}
HEAD = {"forward_ms": 1.0, "backward_ms": 2.0, "wgrad_ms": 4.0, "activation": 0.3, "activation_after_backward": 0.25}


def true_costs(layers: StageLayers) -> CostModel:
    """Identical layers, with the embedding and the head on the first and the last stage."""
    last = layers.num_stages - 1
    return CostModel.of_lists(
        {
            kind: tuple(
                count * LAYER[kind] + EMBEDDING[kind] * (stage == 0) + HEAD[kind] * (stage == last)
                for stage, count in enumerate(layers.per_stage)
            )
            for kind in LAYER
        },
        comm_ms=0.3,
    )


def predicted(costs: CostModel, measured: StageLayers, wanted: StageLayers) -> CostModel:
    model = Model.measured(("layer",) * wanted.num_layers, measured, costs)
    return costs_of_placements(model, lambda _: wanted, costs)(Placement.linear(wanted.num_stages))


@pytest.mark.parametrize("measured", [StageLayers.spread(8, Placement.v(2)), StageLayers(per_stage=(1, 3, 2, 0))])
@pytest.mark.parametrize("wanted", [(4, 4), (2, 2, 2, 2), (0, 3, 3, 0), (1,) * 8])
def test_the_costs_of_stages_that_were_not_measured(measured: StageLayers, wanted: tuple[int, ...]) -> None:
    layers = StageLayers(per_stage=wanted)
    exchanges: dict[str, Any] = {"all_to_all": (0.2, 0.3), "wgrad_beside": 0.5}
    found, true = (
        predicted(replace(true_costs(measured), **exchanges), measured, layers),
        replace(true_costs(layers), **exchanges),
    )
    for name in ("comm_ms", "all_to_all", "wgrad_beside"):
        assert getattr(found, name) == getattr(true, name)
    for kind in LAYER:
        assert getattr(found, kind) == pytest.approx(getattr(true, kind)), kind


def test_fused_passes_have_no_weight_gradient() -> None:
    layers = StageLayers.spread(8, Placement.v(2))
    fused = CostModel.uniform(Placement.v(2), backward_ms=2.0, wgrad_ms=0.0, activation_after_backward=0.0)
    found = predicted(fused, layers, StageLayers.spread(8, Placement.linear(2)))
    assert found == CostModel.uniform(Placement.linear(2), backward_ms=2.0, wgrad_ms=0.0, activation_after_backward=0.0)


def test_parts_are_never_negative() -> None:
    """A first stage that happened to run faster than its layers should; two stages, of which one is taken for layers only."""
    ones = (1.0,) * 3
    costs = CostModel.of_lists(
        {"forward_ms": (9, 10, 12), "backward_ms": ones, "wgrad_ms": ones, "activation": ones, "activation_after_backward": ones}
    )
    model = Model.measured(("layer",) * 3, StageLayers(per_stage=(1, 1, 1)), costs)
    assert [model.kinds[name].forward_ms for name in ("embedding", "layer", "head")] == [0.0, 10.0, 2.0]
    two = CostModel.of_lists(dict.fromkeys(LAYER, (3.0, 4.0)))
    model = Model.measured(("layer",), StageLayers(per_stage=(1, 0)), two)
    assert [model.kinds[name].forward_ms for name in ("embedding", "layer", "head")] == [0.0, 3.0, 4.0]
