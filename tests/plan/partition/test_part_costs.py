"""From the costs of one placement to those of another."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.part_costs import PartCosts, PartTimes
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

LAYER = {"forward_ms": 2.0, "backward_ms": 3.0, "wgrad_ms": 1.5, "activation": 0.2, "activation_after_backward": 0.1}
EMBEDDING = {"forward_ms": 0.5, "backward_ms": 0.25, "wgrad_ms": 0.0, "activation": 0.01, "activation_after_backward": 0.0}
HEAD = {"forward_ms": 1.0, "backward_ms": 2.0, "wgrad_ms": 4.0, "activation": 0.3, "activation_after_backward": 0.25}


def true_costs(layers: StageLayers) -> CostModel:
    """Identical layers, with the embedding and the head on the first and the last stage."""
    last = layers.num_stages - 1
    return CostModel(
        comm_ms=0.3,
        **{
            kind: tuple(
                count * LAYER[kind] + EMBEDDING[kind] * (stage == 0) + HEAD[kind] * (stage == last)
                for stage, count in enumerate(layers.per_stage)
            )
            for kind in LAYER
        },
    )


@pytest.mark.parametrize("measured", [StageLayers.spread(8, Placement.v(2)), StageLayers(per_stage=(1, 3, 2, 0))])
@pytest.mark.parametrize("wanted", [(4, 4), (2, 2, 2, 2), (0, 3, 3, 0), (1,) * 8])
def test_the_costs_of_stages_that_were_not_measured(measured: StageLayers, wanted: tuple[int, ...]) -> None:
    layers = StageLayers(per_stage=wanted)
    found, true = PartCosts.from_stages(true_costs(measured), measured).costs(layers), true_costs(layers)
    assert found.comm_ms == true.comm_ms
    for kind in LAYER:
        assert getattr(found, kind) == pytest.approx(getattr(true, kind)), kind


def test_fused_passes_have_no_weight_gradient() -> None:
    layers = StageLayers.spread(8, Placement.v(2))
    fused = CostModel.uniform(Placement.v(2), backward_ms=2.0, wgrad_ms=0.0, activation_after_backward=0.0)
    found = PartCosts.from_stages(fused, layers).costs(StageLayers.spread(8, Placement.linear(2)))
    assert found == CostModel.uniform(Placement.linear(2), backward_ms=2.0, wgrad_ms=0.0, activation_after_backward=0.0)


@pytest.mark.parametrize("per_stage", [(2, 2, 2, 2), (0, 3, 4, 1), (1, 0)])
def test_parts_from_stages(per_stage: tuple[int, ...]) -> None:
    """Exact where there are stages of layers alone, or an end without any extra time."""
    layers = StageLayers(per_stage=per_stage)
    times = PartTimes(layer_ms=3.0, embedding_ms=0.5 if layers.num_stages > 2 else 0.0, head_ms=4.0)
    assert PartTimes.from_stages(times.stages_ms(layers), layers) == times


def test_parts_are_never_negative() -> None:
    """A first stage that happened to run faster than its layers should."""
    assert PartTimes.from_stages([9.0, 10.0, 12.0], StageLayers(per_stage=(1, 1, 1))) == PartTimes(layer_ms=10.0, head_ms=2.0)


@pytest.mark.parametrize(("name", "value"), [("layer_ms", 0.0), ("embedding_ms", -1.0), ("head_ms", float("nan"))])
def test_impossible_times_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be a finite number"):
        PartTimes(**({"layer_ms": 1.0} | {name: value}))
