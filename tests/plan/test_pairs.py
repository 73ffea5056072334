"""Plans with pairs: what is legal, how they run in the simulator, their files and pictures, and torch's table of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.errors import DeadlockError, PlanError
from megatron.zerobubble.messages import parse_json
from megatron.zerobubble.plan.communication import Payload, place_communication, speculative_forwards
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.deadlock import stuck_ranks
from megatron.zerobubble.plan.dependencies import requirements, result_of
from megatron.zerobubble.plan.ir import FORMATS, Op, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.plan_summary import plan_svg, plan_trace
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.simulate import lengths_ms, simulate
from megatron.zerobubble.plan.torch_csv import from_torch_csv, to_torch_csv
from megatron.zerobubble.plan.transforms import first_microbatches, forward_only, split_fused
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.playground.recorded import read_trace
from tests.plan.test_communication import placements, random_plan
from tests.support.plans import paired, plan_of_text
from tests.support.program_checker import check, check_posts
from tools.benchmarks.ep_overlap import torch_dualpipev


def two_ranks(*pairs: str, text: str = "0F0 0F1 0F2 0B0 0B1 0W0 0B2 0W1 0W2\n1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2") -> Plan:
    plan = plan_of_text(text, schedule="small", placement=Placement.linear(2), num_microbatches=3)
    return replace(plan, pairs=frozenset(map(Op.parse, pairs)))


SMALL = two_ranks("0F2")
ONE_F_ONE_B = paired(build_plan("1f1b", num_ranks=3, num_microbatches=6))


# -- what is legal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        (["0F0"], r"rank 0, step 0: 0F0 is in a pair with 0F1 .*pair an F with a B or BW of another microbatch"),
        (["1F1"], r"rank 1, step 2: 1F1 is in a pair with 1B1"),
        (["0B1"], r"rank 0, step 4: 0B1 is in a pair with 0W0"),
        (["0W2"], r"0W2 is in a pair with nothing behind it"),
        (["0F7"], r"a pair that begins with 0F7, which no rank runs"),
    ],
)
def test_an_illegal_pair_is_refused_where_it_stands(pairs: list[str], problem: str) -> None:
    validate(SMALL)
    with pytest.raises(PlanError, match=problem):
        validate(two_ranks(*pairs))


def test_two_pairs_that_need_each_other_are_a_deadlock() -> None:
    """Rank 1's B0 would need F1, which waits on rank 0 for B0; one after the other the same ops run."""
    text = "0F0 0F1 0B0 0F2 0W0 0B1 0W1 0B2 0W2\n1F0 1F1 1B0 1F2 1B1 1W0 1W1 1B2 1W2"
    validate(two_ranks(text=text.replace("1F1 1B0", "1B0 1F1")))
    validate(two_ranks("1F1", text=text.replace("0F1 0B0 0F2", "0F1 0F2 0B0")))
    validate(two_ranks(text=text))
    with pytest.raises(DeadlockError, match=r"rank 0 is at step 1, with 0B0 in the pair 0F1\+0B0 .*waits for 1B0"):
        validate(two_ranks("0F1", "1F1", text=text))


def test_memory_counts_both_ops_of_a_pair() -> None:
    """The F of a pair is in memory before its B frees anything."""
    costs = CostModel.uniform(Placement.linear(2), activation_after_backward=0.5)
    assert simulate(SMALL, costs).peak_memory == simulate(two_ranks(), costs).peak_memory == (1.5, 1.0)


# -- how they run -------------------------------------------------------------------------------------------------------------


def test_both_ops_of_a_pair_begin_when_both_can_and_take_the_time_of_both() -> None:
    costs = CostModel.uniform(Placement.linear(2), forward_ms=2.0, backward_ms=3.0, wgrad_ms=1.0)
    simulation = simulate(SMALL, costs)
    row = {str(op): (start, end) for op, start, end in simulation.rows[0]}
    assert row["0F1"] == (2.0, 4.0)
    assert row["0F2"] == row["0B0"] == (7.0, 12.0)  # 1B0 ends at 7
    assert row["0B1"][0] == 12.0
    assert sum(lengths_ms(simulation.rows[0])) == pytest.approx(18.0)
    assert {str(op): start for op, start, _ in simulation.rows[1]}["1F2"] == 12.0


@given(placements(), st.integers(1, 4), st.integers(0, 10**6))
def test_a_pair_waits_for_what_both_ops_need_and_the_other_ops_for_nothing_else(p: Placement, m: int, seed: int) -> None:
    plan = paired(replace(random_plan(p, m, seed), pairs=frozenset()), random.Random(seed))
    costs = CostModel.uniform(p)
    rows = simulate(plan, costs).rows
    at = {op: (start, end) for row in rows for op, start, end in row}
    results = {result_of(op): op for op in at}
    for row, launches in zip(rows, plan.launches, strict=True):
        ends = [0.0, *(at[launch[0]][1] for launch in launches)]
        for launch, free in zip(launches, ends, strict=False):
            needs = [at[results[need]][1] for op in launch for need in requirements(op, plan.num_stages)]
            assert {at[op][0] for op in launch} == {max([free, *needs])}
        assert [timed.op for timed in row] == [op for launch in launches for op in launch]


@given(placements(), st.integers(1, 5), st.integers(0, 10**6))
def test_the_program_of_single_ops_has_the_same_order_on_every_link(p: Placement, m: int, seed: int) -> None:
    program = place_communication(paired(replace(random_plan(p, m, seed), pairs=frozenset()), random.Random(seed)))
    check(program)
    single = program.one_by_one()
    check_posts(single)
    assert stuck_ranks(single) == ()
    assert [[step.ops for step in row] for row in single.steps] == [[(op,) for op in row] for row in program.plan.ops]
    for one, other in zip(program.steps, single.steps, strict=True):
        assert [each for step in one for each in step.send] == [each for step in other for each in step.send]
        assert [each for step in one for each in (*step.post, *step.send)] == [
            each for step in other for each in (*step.post, *step.send)
        ]


def test_what_a_pair_sends_and_takes() -> None:
    """Messages come in the order of the ops: the activation, then the gradient. Each op says whether it is its kind's last."""
    row = place_communication(ONE_F_ONE_B).steps[1]
    step = next(step for step in row if len(step.ops) == 2)
    assert [message.payload for message in step.take] == [Payload.ACTIVATION, Payload.GRADIENT]
    assert [message.target for message in step.send] == [2, 0]
    assert [ends for step in row for ends, op in zip(step.last_of_kind, step.ops, strict=True)] == [
        op.microbatch == 5 for op in ONE_F_ONE_B.ops[1]
    ]


def test_no_pair_runs_before_the_outcome_of_the_last_step_is_known() -> None:
    plan = build_plan("1f1b", num_ranks=3, num_microbatches=6)
    assert speculative_forwards(plan) == (3, 2, 0)
    assert speculative_forwards(paired(plan)) == (2, 1, 0)


# -- transforms ---------------------------------------------------------------------------------------------------------------


def test_transforms_keep_the_pairs_whose_ops_stay_adjacent() -> None:
    pairs = ONE_F_ONE_B.pairs
    assert len(pairs) == 9
    assert split_fused(ONE_F_ONE_B).pairs == pairs
    assert forward_only(ONE_F_ONE_B).pairs == frozenset()
    assert first_microbatches(ONE_F_ONE_B, 4).pairs == {op for op in pairs if op.microbatch < 4}


# -- files and pictures -------------------------------------------------------------------------------------------------------


@given(placements(), st.integers(1, 4), st.integers(0, 10**6))
def test_files_keep_pairs_and_plans_without_them_have_their_format(p: Placement, m: int, seed: int) -> None:
    plan = paired(replace(random_plan(p, m, seed), pairs=frozenset()), random.Random(seed))
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert parse_json(text, "the plan", PlanError)["format"] == FORMATS[3 if plan.pairs else 0]
    assert from_torch_csv(to_torch_csv(plan), schedule="random") == plan


def test_only_the_newest_format_has_pairs() -> None:
    text = SMALL.to_json()
    assert '"0F2+0B0"' in text
    with pytest.raises(PlanError, match="not an op"):
        Plan.from_json(text.replace(FORMATS[3], FORMATS[0]))
    with pytest.raises(PlanError, match="'0B0\\+0B1' is not an op"):
        Plan.from_json(text.replace('"0F2+0B0", "0B1"', '"0F2+0B0+0B1"'))
    sliced = build_plan("zb-h1", num_ranks=2, num_microbatches=3, num_slices=2)
    assert Plan.from_json(paired(sliced).to_json()) == paired(sliced)
    assert paired(sliced).pairs


def test_pictures_show_a_pair_as_one_box_or_two_halves() -> None:
    simulation = simulate(SMALL, CostModel.uniform(Placement.linear(2)))
    assert render_text(simulation.rows).splitlines()[1] == "rank 0  F- F- .. F+B-- B- W- B- W- W-"
    svg = plan_svg(simulation)
    assert svg.count("height='13'") == 2
    (timeline,) = read_trace(parse_json(plan_trace(simulation), "the trace", PlanError))
    assert timeline.plan.launches == SMALL.launches


def test_the_table_of_torchs_dualpipev_is_a_v_with_pairs() -> None:
    table = torch_dualpipev(4, 10)
    plan = from_torch_csv(table)
    validate(plan)
    assert plan.placement == Placement.v(4)
    assert len(plan.pairs) == table.count("OVERLAP_F_B") > 0
    assert to_torch_csv(plan) == table
    assert stuck_ranks(place_communication(plan)) == ()
