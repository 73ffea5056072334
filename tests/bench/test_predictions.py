"""What predictions take the passes to be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zerobubble.bench.predictions import FirstBlock, _simulated
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import Timeline
from tests.support.plans import paired


def _costs(scale: float, num_slices: int) -> CostModel:
    lists = {"forward_ms": (2.0, 4.0), "backward_ms": (3.0, 5.0), "wgrad_ms": (1.0, 2.0)}
    memory = {"activation": (1.0, 1.0), "activation_after_backward": (0.5, 0.5)}
    times = {name: tuple(scale * value for value in values) for name, values in lists.items()}
    costs = CostModel.of_lists(times | memory)
    return costs.divided(num_slices)


def _block(scale: float, later: tuple[float, ...], num_slices: int) -> FirstBlock:
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=3, num_slices=num_slices)
    result: Any = SimpleNamespace(measured=SimpleNamespace(costs=_costs(scale, num_slices)), timeline=None, sizes=None)
    timelines = [Timeline.planned(simulate(plan, _costs(each, num_slices))) for each in (scale, *later)]
    return FirstBlock(contender=None, program=None, result=result, recorded=timelines)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize(("later", "expected"), [((), 10.0), ((3.0, 4.0), 4.0), ((1.0, 3.0, 4.0, 5.0), 4.0)])
def test_passes_take_the_median_of_all_blocks(later: tuple[float, ...], expected: float, num_slices: int) -> None:
    """A first block on a machine that was busy just then is one of several."""
    found, base = _block(10.0, later, num_slices).costs, _costs(1.0, num_slices)
    assert found is not None
    assert found.num_slices == num_slices
    for name in ("forward_ms", "backward_ms", "wgrad_ms"):
        for own, of_one in zip(found.rows(name), base.rows(name), strict=True):
            assert own == pytest.approx([expected * value for value in of_one]), name
    assert found.rows("activation") == base.rows("activation")


def test_pairs_are_predicted_with_the_measured_share_of_all_to_alls() -> None:
    """Their passes end together, so that a recording has no times of the single ones."""
    costs = replace(_costs(2.0, 1), all_to_all=(0.5, 0.25), wgrad_beside=0.5)
    plan = paired(build_plan("zb-h1", num_ranks=2, num_microbatches=3))
    result: Any = SimpleNamespace(measured=SimpleNamespace(costs=costs), timeline=None, sizes=None, plan=plan.to_json())
    recorded = [Timeline.planned(simulate(plan, _costs(each, 1))) for each in (1.0, 3.0)]
    block = FirstBlock(contender=SimpleNamespace(text="zb-h1"), program=None, result=result, recorded=recorded)  # type: ignore[arg-type]
    assert block.costs == costs
    stock = _block(2.0, (), 1)
    vars(stock).update(contender=SimpleNamespace(text="stock"))
    stock.result.plan = build_plan("1f1b", num_ranks=2, num_microbatches=3).to_json()
    stock.result.measured.costs = replace(costs, wgrad_beside=0.0)
    found = _simulated(block, [stock, block])
    assert found is not None
    assert (found.costs.all_to_all, found.costs.wgrad_beside) == ((0.5, 0.25), 0.5)
    assert found.makespan_ms < simulate(plan, _costs(2.0, 1)).makespan_ms


@pytest.mark.parametrize("has_slices", [False, True])
def test_beside_slices_every_contender_has_its_own_times(has_slices: bool) -> None:
    """Whole microbatches that ran alone were faster than what all blocks together say; without slices all have the same times."""
    blocks = [_block(4.0, (4.0,), 1), _block(1.0, (1.0,), 1), _block(5.0, (5.0,), 2 if has_slices else 1)]
    for number, block in enumerate(blocks):
        own = {"contender": SimpleNamespace(text=str(number)), "program": None}
        block.result.plan = block.recorded[0].plan.to_json()
        vars(block).update(own)
    times = [_simulated(block, blocks).makespan_ms for block in blocks]  # type: ignore[union-attr]
    if has_slices:
        assert times[0] == pytest.approx(4.0 * times[1])
    else:
        assert times[0] == times[1] == times[2]
