"""Plan -> Plan."""

import pytest

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.transforms import first_microbatches, forward_only, split_fused
from megatron.zerobubble.plan.validate import live_microbatches, validate

NAMES = [info.name for info in known_schedules()]


@pytest.mark.parametrize("name", NAMES)
def test_forward_only_keeps_every_forward_in_order(name: str) -> None:
    plan = build_plan(name, num_ranks=3, num_microbatches=7)
    evaluation = forward_only(plan)
    validate(evaluation, forward_only=True)
    assert evaluation.placement == plan.placement
    assert [list(row) for row in evaluation.ops] == [[op for op in row if op.kind is OpKind.F] for row in plan.ops]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_microbatches_of_a_plan_are_a_plan(name: str) -> None:
    plan = build_plan(name, num_ranks=3, num_microbatches=7)
    for m in range(1, 8):
        fewer = first_microbatches(plan, m)
        validate(fewer)
        assert fewer.num_microbatches == m
        assert all(few <= all_ for few, all_ in zip(live_microbatches(fewer), live_microbatches(plan), strict=True))
    with pytest.raises(PlanError, match="7 microbatches; it cannot be restricted to 8"):
        first_microbatches(plan, 8)


@pytest.mark.parametrize("name", NAMES)
def test_split_fused_leaves_no_bw(name: str) -> None:
    plan = split_fused(build_plan(name, num_ranks=3, num_microbatches=4))
    validate(plan)
    assert not any(op.kind is OpKind.BW for row in plan.ops for op in row)
    assert split_fused(plan) == plan
