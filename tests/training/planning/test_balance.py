"""--zero-bubble-balance-stages: the times and the layout that it logs for a recorded iteration."""

from __future__ import annotations

import pytest
import torch

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.partition.balance import PartTimes
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import RankTimeline, Timeline
from megatron.zerobubble.training.planning.balance import measured_parts, proposal


class _Recorded:
    """Stands in for a schedule that has run a plan exactly as simulated."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        ranks = tuple(RankTimeline(ops=row) for row in simulate(plan, costs).rows)
        self._ran = Timeline(iteration=2, plan=plan, ranks=ranks)
        self.device = torch.device("cpu")

    def timelines(self) -> list[Timeline]:
        return [self._ran]


class _Unrecorded:
    def timelines(self) -> list[Timeline]:
        return []


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ["zbv", "1f1b"])
def test_part_times_follow_from_a_recorded_iteration(name: str) -> None:
    """F, B and W apart, and fused; from a recorded iteration, and from costs."""
    plan = build_plan(name, num_ranks=4, num_microbatches=8)
    layers = StageLayers.spread(16, plan.placement)
    expected = PartTimes(layer_ms=6.0, embedding_ms=0.75, head_ms=9.0)
    third = tuple(time / 3 for time in expected.stages_ms(layers))
    costs = CostModel(
        forward_ms=third,
        backward_ms=third,
        wgrad_ms=third,
        activation=(1.0,) * layers.num_stages,
        activation_after_backward=(1.0,) * layers.num_stages,
    )
    for given in (None, costs):
        found = measured_parts(_Recorded(plan, costs), layers, given)  # type: ignore[arg-type]
        assert found is not None
        assert vars(found) == pytest.approx(vars(expected))


@pytest.mark.usefixtures("world_of_one")
def test_nothing_recorded() -> None:
    layers = StageLayers.spread(4, Placement.linear(2))
    assert measured_parts(_Unrecorded(), layers, None) is None  # type: ignore[arg-type]


def test_a_proposal_states_its_gain() -> None:
    placement = Placement.linear(4)
    line = proposal(PartTimes(layer_ms=10.0, head_ms=21.0), StageLayers.spread(16, placement), placement)
    assert line == (
        "stages: F, B and W of a microbatch take 10.00 ms in a layer, 0.00 ms in the embedding and 21.00 ms in the head; the "
        'bottleneck rank computes 61.00 ms; with --pipeline-model-parallel-layout "Et*5|t*5|tttt|ttL" it would be 50.00 ms, '
        "1.22 times as fast in the steady state"
    )


def test_the_best_layout_is_not_changed() -> None:
    layers, placement = StageLayers(per_stage=(2, 1)), Placement.linear(2)
    line = proposal(PartTimes(layer_ms=10.0, head_ms=9.0), layers, placement)
    assert line.endswith("and no layout reduces that (now Ett|tL)")
    assert "(estimated: with two stages, one is assumed to hold layers only)" in line
