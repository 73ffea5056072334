"""What predictions take the passes to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zerobubble.bench.predictions import FirstBlock
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.slice_costs import SliceCosts
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import Timeline

PLAN = build_plan("zb-h1", num_ranks=2, num_microbatches=3, num_slices=2)


def _costs(scale: float) -> CostModel:
    lists = {"forward_ms": (2.0, 4.0), "backward_ms": (3.0, 5.0), "wgrad_ms": (1.0, 2.0)}
    memory = {"activation": (1.0, 1.0), "activation_after_backward": (0.5, 0.5)}
    times = {name: tuple(scale * value for value in values) for name, values in lists.items()}
    return CostModel.of_lists(times | memory).with_slices(SliceCosts.even(times | memory, 2))


def _block(scale: float, later: tuple[float, ...]) -> FirstBlock:
    result: Any = SimpleNamespace(measured=SimpleNamespace(costs=_costs(scale)), timeline=None)
    timelines = [Timeline.planned(simulate(PLAN, _costs(each))) for each in later]
    return FirstBlock(contender=None, program=None, result=result, later=timelines)  # type: ignore[arg-type]


@pytest.mark.parametrize(("later", "expected"), [((), 10.0), ((3.0, 4.0), 4.0), ((1.0, 3.0, 4.0, 5.0), 4.0)])
def test_slices_take_the_median_of_all_blocks(later: tuple[float, ...], expected: float) -> None:
    """A first block on a machine that was busy just then is one of several."""
    found = _block(10.0, later).costs
    assert found is not None
    assert found.slices is not None
    for name in ("forward_ms", "backward_ms", "wgrad_ms"):
        for own, base in zip(getattr(found.slices, name), getattr(_costs(1.0).slices, name), strict=True):
            assert own == pytest.approx([expected * value for value in base]), name
    assert found.slices.activation == _costs(1.0).slices.activation  # type: ignore[union-attr]
