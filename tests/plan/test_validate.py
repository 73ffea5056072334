"""The validator refuses every kind of broken plan, and its message shows where."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.errors import DeadlockError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.dependencies import execution_order
from megatron.zerobubble.plan.ir import Op, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.transforms import forward_only
from megatron.zerobubble.plan.validate import (
    live_microbatches,
    live_timeline,
    pending_timeline,
    pending_wgrads,
    validate,
)
from tests.support.plans import plan_of_text

Rows = list[list[str]]


def mutated(change: Callable[[Rows], None], *, schedule: str = "zb-h1", p: int = 3, m: int = 4) -> Plan:
    plan = build_plan(schedule, num_ranks=p, num_microbatches=m)
    rows = [[str(op) for op in row] for row in plan.ops]
    change(rows)
    return Plan.of("broken", plan.placement, m, [[Op.parse(word) for word in row] for row in rows])


def swap(rank: int, one: str, other: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        row = rows[rank]
        i, j = row.index(one), row.index(other)
        row[i], row[j] = row[j], row[i]

    return change


def replace(rank: int, old: str, *new: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        at = rows[rank].index(old)
        rows[rank][at : at + 1] = new

    return change


BROKEN = {
    "foreign stage": (replace(1, "1F2", "0F2"), "rank 1, step 3: 0F2 belongs to a stage of rank 0", ">0F2<"),
    "no such stage": (replace(2, "2F2", "3F2"), "3F2 has a stage that does not exist", ">3F2<"),
    "no such microbatch": (replace(0, "0W3", "0W4"), "0W4 has a microbatch that does not exist", ">0W4<"),
    "forward missing": (replace(1, "1F2"), "rank 1, step 11: 1F2 is missing", ">--<"),
    "backward missing": (replace(0, "0B3"), "0B3 is missing", ">--<"),
    "wgrad missing": (replace(2, "2W1"), "2W1 is missing", ">--<"),
    "forward twice": (replace(0, "0F1", "0F1", "0F1"), "0F1 is computed twice, first at step 1", ">0F1<"),
    "wgrad twice": (replace(2, "2W3", "2W3", "2W3"), "2W3 is computed twice", ">2W3<"),
    "fused and B": (replace(1, "1W3", "1BW3"), "1B3 repeats a part of 1BW3", ">1B3<"),
    "fused and W": (replace(0, "0B2", "0BW2"), "0W2 repeats a part of 0BW2", ">0W2<"),
    "fused before an earlier W": (replace(1, "1B2", "1BW2"), "1W1 comes after 1BW2", ">1W1<"),
    "W before B": (swap(0, "0B0", "0W0"), "0W0 comes before 0B0", ">0W0<"),
    "B before F": (swap(2, "2F0", "2B0"), "2B0 comes before 2F0", ">2B0<"),
    "forwards descend": (swap(0, "0F1", "0F2"), "0F1 comes after 0F2", ">0F1<"),
    "backwards descend": (swap(0, "0B1", "0B2"), "0B1 comes after 0B2", ">0B1<"),
    "wgrads descend": (swap(2, "2W1", "2W2"), "2W1 comes after 2W2", ">2W1<"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plans_are_refused_with_the_marked_grid(kind: str) -> None:
    change, message, mark = BROKEN[kind]
    with pytest.raises(PlanError) as caught:
        validate(mutated(change))
    text = str(caught.value)
    assert message in text
    assert mark in text
    for word in ("plan 'broken'", "stage ", "microbatch ", "\n  rank 0 ", "\n  rank 1 ", "\n  rank 2 "):
        assert word in text


def test_the_whole_message_of_a_small_plan() -> None:
    plan = plan_of_text("0F0 0B0 0W0\n1B0 1F0 1W0", schedule="by hand", placement=Placement.linear(2), num_microbatches=1)
    with pytest.raises(PlanError) as caught:
        validate(plan)
    assert str(caught.value).splitlines() == [
        "plan 'by hand', rank 1, step 0: 1B0 comes before 1F0 (stage 1, microbatch 0); move it after 1F0, which is at step 1",
        "  step       0     1     2",
        "  rank 0   0F0   0B0   0W0",
        "  rank 1 >1B0<   1F0   1W0",
    ]


def test_deadlock_names_every_stuck_rank_and_what_it_waits_for() -> None:
    def change(rows: Rows) -> None:
        rows[0].insert(1, rows[0].pop(rows[0].index("0B0")))

    with pytest.raises(DeadlockError) as caught:
        validate(mutated(change))
    assert str(caught.value).splitlines() == [
        "plan 'broken' deadlocks: 3 of 3 ranks can never proceed",
        "  rank 0 is at step 1, 0B0 (stage 0, microbatch 0), and waits for 1B0, which rank 1 runs at step 2",
        "  rank 1 is at step 1, 1F1 (stage 1, microbatch 1), and waits for 0F1, which rank 0 runs at step 2",
        "  rank 2 is at step 2, 2F1 (stage 2, microbatch 1), and waits for 1F1, which rank 1 runs at step 1",
        "move each awaited op before the op at which its own rank is stuck:",
        "  step       0     1     2     3     4     5     6     7     8     9    10    11",
        "  rank 0   0F0 >0B0<   0F1   0F2   0W0   0F3   0B1   0W1   0B2   0W2   0B3   0W3",
        "  rank 1   1F0 >1F1<   1B0   1F2   1B1   1W0   1F3   1B2   1W1   1B3   1W2   1W3",
        "  rank 2   2F0   2B0 >2F1<   2B1   2F2   2B2   2W0   2F3   2B3   2W1   2W2   2W3",
    ]


def test_waiting_for_an_op_that_no_rank_computes_is_a_deadlock() -> None:
    plan = mutated(replace(1, "1F3"))
    with pytest.raises(DeadlockError, match="waits for 1F3, which no rank computes"):
        execution_order(plan)


@pytest.mark.parametrize("case", ["missing", "deadlock"])
def test_messages_about_large_plans_stay_readable(case: str) -> None:
    def change(rows: Rows) -> None:
        row = rows[20]
        at = row.index("20B40")
        word = row.pop(at)
        if case == "deadlock":
            row.insert(at - 40, word)

    check = execution_order if case == "deadlock" else validate
    with pytest.raises(PlanError) as caught:
        check(mutated(change, schedule="zbv", p=24, m=72))
    text = str(caught.value)
    assert len(text.splitlines()) < 45
    assert max(map(len, text.splitlines())) < 200
    assert ">" in text
    assert "rank 20" in text
    assert "more ranks not shown" in text


@given(st.data())
def test_any_two_ops_swapped_are_judged_and_never_crash(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([info.name for info in known_schedules()]))
    plan = build_plan(name, num_ranks=data.draw(st.integers(1, 4)), num_microbatches=data.draw(st.integers(1, 6)))
    rows = [list(row) for row in plan.ops]
    a, b = (data.draw(st.integers(0, plan.num_ranks - 1)) for _ in range(2))
    i, j = (data.draw(st.integers(0, len(rows[rank]) - 1)) for rank in (a, b))
    rows[a][i], rows[b][j] = rows[b][j], rows[a][i]
    changed = Plan.of("swapped", plan.placement, plan.num_microbatches, rows)
    if changed.ops == plan.ops:
        return
    try:
        validate(changed)
    except PlanError as error:
        assert "rank " in str(error)  # noqa: PT017 - a swap may as well leave a valid plan
    else:
        assert a == b
        assert len(execution_order(changed)) == sum(map(len, plan.ops))


def test_memory_limit() -> None:
    plan = build_plan("zb-h2", num_ranks=4, num_microbatches=12)
    validate(plan, memory_limit=7 / 4)
    with pytest.raises(PlanError, match=r"rank 0, step 6: memory peaks at 1\.7500 and the limit is 1\.0000") as caught:
        validate(plan, memory_limit=1.0)
    assert ">0F6<" in str(caught.value)
    costs = CostModel.uniform(plan.placement, activation_after_backward=0.0)
    validate(plan, memory_limit=7 / 4, costs=costs)


def test_forward_only() -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=3)
    evaluation = forward_only(plan)
    validate(evaluation, forward_only=True)
    with pytest.raises(PlanError, match=r"0B0 is missing .* add 0B0 and 0W0, or 0BW0; a plan for evaluation"):
        validate(evaluation)
    with pytest.raises(PlanError, match="0B0 is a backward op in a forward-only plan"):
        validate(plan, forward_only=True)


def test_a_plan_may_mix_fused_and_split_backwards_if_w_ascends() -> None:
    mixed: dict[str, Any] = {"schedule": "mixed", "placement": Placement.linear(2), "num_microbatches": 2}
    plan = plan_of_text("0F0 0F1 0B0 0W0 0BW1\n1F0 1BW0 1F1 1B1 1W1", **mixed)
    validate(plan)
    assert live_microbatches(plan) == (2, 1)
    assert live_timeline(plan) == ((1, 2, 2, 1, 0), (1, 0, 1, 1, 0))
    assert pending_timeline(plan) == ((0, 0, 1, 0, 0), (0, 0, 0, 1, 0))
    assert pending_wgrads(plan) == (1, 1)

    plan = plan_of_text("0F0 0F1 0B0 0BW1 0W0\n1F0 1BW0 1F1 1B1 1W1", **mixed)
    with pytest.raises(PlanError, match="0W0 comes after 0BW1"):
        validate(plan)


def test_execution_order_is_every_op_once_and_repeatable() -> None:
    plan = build_plan("zbv", num_ranks=3, num_microbatches=5)
    order = execution_order(plan)
    assert sorted(order) == [(rank, step) for rank, row in enumerate(plan.ops) for step in range(len(row))]
    assert order == execution_order(plan)
