"""The balanced layout, compared with all layouts; and times of a model's parts, derived from its stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.balance import PartTimes, balance
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate

PLACEMENTS = [Placement.linear(1), Placement.linear(2), Placement.linear(4), Placement.v(2), Placement.v(3), Placement.loop(2, 2)]


def _layouts(num_layers: int, num_stages: int) -> Iterator[StageLayers]:
    """Every layout of `num_layers` layers."""
    for counts in itertools.product(range(num_layers + 1), repeat=num_stages):
        if sum(counts) == num_layers and all(counts[1:-1]):
            yield StageLayers(per_stage=counts)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: f"{placement.name}{placement.num_ranks}")
def test_no_layout_is_better(placement: Placement) -> None:
    """All layouts of small models, and parts that take whole milliseconds, so that equal sums are equal floats."""
    draw = random.Random(placement.num_stages)
    for num_layers in range(max(1, placement.num_stages - 2), 8):
        layouts = list(_layouts(num_layers, placement.num_stages))
        for _ in range(12):
            times = PartTimes(layer_ms=draw.randint(1, 5), embedding_ms=draw.randint(0, 7), head_ms=draw.randint(0, 25))
            chosen = balance(num_layers, placement, times)
            assert chosen.num_layers == num_layers
            best = min(times.load(layout, placement) for layout in layouts)
            assert times.load(chosen, placement) == best, (times, chosen)


def test_the_head_costs_the_last_stage_its_layers() -> None:
    linear = balance(16, Placement.linear(4), PartTimes(layer_ms=10.0, embedding_ms=1.0, head_ms=21.0))
    assert linear.per_stage == (4, 5, 5, 2)
    v = balance(16, Placement.v(4), PartTimes(layer_ms=10.0, embedding_ms=1.0, head_ms=21.0))
    assert v.per_stage == (2, 3, 3, 2, 2, 2, 2, 0)
    assert [sum(v.per_stage[stage] for stage in row) for row in Placement.v(4).rank_to_stages] == [2, 5, 5, 4]


@pytest.mark.parametrize("schedule", ["zbv", "zb-h1"])
def test_a_balanced_pipeline_is_faster_in_the_simulator(schedule: str) -> None:
    """A head as long as three layers: the order of passes stays what it was, and the span falls by nearly what ranks save."""
    plan = build_plan(schedule, num_ranks=4, num_microbatches=12)
    times = PartTimes(layer_ms=12.0, embedding_ms=6.0, head_ms=36.0)
    even = StageLayers.spread(32, plan.placement)
    best = balance(32, plan.placement, times)

    def span_ms(layers: StageLayers) -> float:
        third = tuple(time / 3 for time in times.stages_ms(layers))
        whole = (1.0,) * layers.num_stages
        costs = CostModel(forward_ms=third, backward_ms=third, wgrad_ms=third, activation=whole, activation_after_backward=whole)
        return simulate(plan, costs).span_ms

    saved = times.load(even, plan.placement).bottleneck_rank_ms / times.load(best, plan.placement).bottleneck_rank_ms
    assert saved > 1.15
    assert span_ms(even) / span_ms(best) > 1.0 + 0.7 * (saved - 1.0)


def test_too_few_layers() -> None:
    with pytest.raises(ConfigError, match="5 layers are too few for 8 stages: all but the first and the last need one, 6 in all"):
        balance(5, Placement.v(4), PartTimes(layer_ms=1.0))


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
