"""Grouped weight gradients: the places of the Ws and their memory."""

from __future__ import annotations

import itertools

import pytest

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.simulate import peak_memory
from megatron.zerobubble.plan.transforms import group_weight_gradients, split_fused, wgrad_group
from megatron.zerobubble.plan.validate import validate

NAMES = [info.name for info in known_schedules()]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("name", NAMES)
def test_groups_are_adjacent_and_nothing_else_moves(name: str, size: int) -> None:
    plan = split_fused(build_plan(name, num_ranks=3, num_microbatches=7))
    grouped = group_weight_gradients(plan, size)
    validate(grouped)
    assert group_weight_gradients(grouped, size) == grouped
    for before, after in zip(plan.ops, grouped.ops, strict=True):
        assert [op for op in after if op.kind is not OpKind.W] == [op for op in before if op.kind is not OpKind.W]
        for op in after:
            group = wgrad_group(op.microbatch, size, plan.num_microbatches)
            if op.kind is OpKind.W and op.microbatch == group[0]:
                begin = after.index(op)
                assert after[begin : begin + len(group)] == tuple(Op(op.stage, OpKind.W, each) for each in group)
    if size == 1:
        assert grouped == plan


def test_by_hand() -> None:
    text = "0F0 0BW0 0F1 0B1 0W1 0F2 0B2 0W2"
    plan = Plan.from_text(text, schedule="zb", placement=Placement.linear(1), num_microbatches=3)
    assert group_weight_gradients(plan, 2).to_text().strip() == "0F0 0B0 0F1 0B1 0W0 0W1 0F2 0B2 0W2"


def test_the_simulator_counts_the_memory_of_a_group() -> None:
    """The last rank of ZB-H1 runs F B W per microbatch; with groups, each microbatch's memory after B stays until its group."""
    plan = build_plan("zb-h1", num_ranks=4, num_microbatches=12)
    costs = CostModel.uniform(plan.placement, activation_after_backward=0.5)
    peaks = [peak_memory(group_weight_gradients(plan, size), costs)[-1] * 4 for size in (1, 2, 3, 6)]
    assert [later - earlier for earlier, later in itertools.pairwise(peaks)] == pytest.approx([0.5, 0.5, 1.5])


def test_no_group_of_none() -> None:
    with pytest.raises(PlanError, match="groups of 0; give 1 or more"):
        group_weight_gradients(build_plan("zb-h1", num_ranks=2, num_microbatches=2), 0)
