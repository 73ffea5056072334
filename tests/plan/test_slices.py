"""Slices of microbatches: order, files, messages, times and memory, and lengths of equal work."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import CostTable
from megatron.zerobubble.plan.costs.length_model import LengthModel, Work, slices_of_sequence
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.costs.slicing import costs_of_other_slices, slice_lengths, unlike_lengths
from megatron.zerobubble.plan.ir import Op, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan, schedule_spec
from megatron.zerobubble.plan.simulate import memory_after_ops, read_plan, simulate
from megatron.zerobubble.plan.torch_csv import to_torch_csv
from megatron.zerobubble.plan.validate import live_microbatches, validate

# -- order --------------------------------------------------------------------------------------------------------------


def with_row(plan: Plan, rank: int, *ops: str) -> Plan:
    rows = list(plan.ops)
    rows[rank] = tuple(map(Op.parse, ops))
    return replace(plan, ops=tuple(rows))


ONE_RANK = build_plan("zb-h1", num_ranks=1, num_microbatches=1, num_slices=2)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("0F0.1 0F0 0B0.1 0B0 0W0.1 0W0", r"0F0 comes after 0F0.1 .*their slices in F ascending and in B and W descending"),
        ("0F0 0F0.1 0B0 0B0.1 0W0.1 0W0", r"0B0.1 comes after 0B0 \(stage 0, microbatch 0, slice 1\)"),
        ("0F0 0F0.1 0B0.1 0B0 0W0 0W0.1", "0W0.1 comes after 0W0"),
        ("0F0 0F0.1 0B0.1 0B0 0W0.1", "0W0 is missing"),
        ("0F0 0B0 0W0", "0F0.1 is missing"),
        ("0F0 0F0.1 0F0.2 0B0.1 0B0 0W0.1 0W0", r"0F0.2 has a slice that does not exist .*slices are 0..1"),
    ],
)
def test_a_wrong_order_of_slices_is_refused(ops: str, message: str) -> None:
    validate(ONE_RANK)
    with pytest.raises(PlanError, match=message):
        validate(with_row(ONE_RANK, 0, *ops.split()))


def test_a_plan_of_slices_is_a_file_of_version_3() -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=3, num_slices=4)
    body = json.loads(plan.to_json())
    assert body["format"] == "zerobubble-plan/3"
    assert body["num_slices"] == 4
    assert body["ops"][0][1] == "0F0.1"
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(build_plan("zbv", num_ranks=2, num_microbatches=3).to_json())["format"] == "zerobubble-plan/1"
    for broken in ({"num_slices": 0}, {"num_slices": "4"}, {"num_slices": None}):
        with pytest.raises(PlanError, match="slices"):
            Plan.from_json(json.dumps(body | broken))


def test_costs_of_slices_are_in_the_file() -> None:
    plan = build_plan("1f1b", num_ranks=2, num_microbatches=3, num_slices=2)
    costs = LengthsAndLinks(sequence_length=64, attention_share=0.3, key_share=0.1).applied(
        CostModel.uniform(plan.placement, comm_ms=1.0), 2
    )
    found, read = read_plan(plan.to_json(costs=costs.to_json()))
    assert (found, read) == (plan, costs)
    assert read is not None
    assert read.comm_ms == 0.5, "of a message that is half as long"
    body = json.loads(plan.to_json(costs=costs.to_json()))
    body["costs"]["slices"]["keys"] = 3
    with pytest.raises(PlanError, match="'keys' of 'slices' must be a list"):
        read_plan(json.dumps(body))


def test_what_has_no_slices_is_refused() -> None:
    plan = build_plan("1f1b", num_ranks=2, num_microbatches=2, num_slices=2)
    with pytest.raises(PlanError, match="2 slices per microbatch; an action table of torch has none"):
        to_torch_csv(plan)
    with pytest.raises(ConfigError, match="'interleaved-1f1b' has no order of slices; choose one of 1f1b, zb-h1"):
        schedule_spec("interleaved-1f1b", num_ranks=2, num_slices=2)
    with pytest.raises(ConfigError, match="num_slices is 0; it must be a whole number, 1 or more"):
        schedule_spec("1f1b", num_ranks=2, num_slices=0)
    with pytest.raises(ConfigError, match="at most 1,024 slices"):
        schedule_spec("1f1b", num_ranks=2, num_slices=2000)


# -- times and memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (3, 7)])
def test_1f1b_of_slices(p: int, m: int, n: int) -> None:
    """Bubble and memory by formula (arXiv 2406.03488), with slices that take the same time."""
    plan = build_plan("1f1b", num_ranks=p, num_microbatches=m, num_slices=n)
    found = simulate(plan, CostModel.uniform(plan.placement))
    assert found.makespan_ms == pytest.approx(3 * (m + (p - 1) / n))
    live = [min(p - rank + n - 1, m * n) for rank in range(p)]
    assert list(live_microbatches(plan)) == live
    assert list(found.peak_memory) == pytest.approx([each / n / min(p, m) for each in live])


def test_keys_are_kept_from_the_first_f_to_the_last_b_and_their_gradients_from_the_first_b() -> None:
    costs = CostModel(
        table=CostTable.of_slices(
            {
                "forward_ms": ((1.0, 1.0),),
                "backward_ms": ((1.0, 1.0),),
                "wgrad_ms": ((1.0, 1.0),),
                "activation": ((4.0, 2.0),),
                "activation_after_backward": ((3.0, 1.0),),
            },
            keys=(10.0,),
            key_gradients=(20.0,),
        )
    )
    row = [Op.parse(text) for text in ["0F0", "0F0.1", "0B0.1", "0W0.1", "0B0", "0W0"]]
    assert memory_after_ops(row, costs) == [14.0, 16.0, 35.0, 34.0, 3.0, 0.0]
    fused = [Op.parse(text) for text in ["0F0", "0F0.1", "0BW0.1", "0BW0"]]
    assert memory_after_ops(fused, costs) == [14.0, 16.0, 34.0, 0.0]
    forwards = [Op.parse(text) for text in ["0F0", "0F0.1", "0F1", "0F1.1"]]
    assert memory_after_ops(forwards, costs) == [14.0, 12.0, 14.0, 12.0]


def test_plain_costs_are_divided_and_those_of_other_slices_refused() -> None:
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=2, num_slices=2)
    costs = CostModel.uniform(plan.placement, comm_ms=0.5)
    assert simulate(plan, costs).rows[0][0].end_ms == 0.5
    sliced = costs.of_plan(plan)
    assert sliced.forward_ms == costs.forward_ms
    assert sliced.comm_ms == 0.25
    with pytest.raises(PlanError, match="the costs are for 2 slices per microbatch and the plan has 4 slices"):
        sliced.of_plan(build_plan("zb-h1", num_ranks=2, num_microbatches=2, num_slices=4))
    with pytest.raises(PlanError, match="the plan has 1 slices"):
        sliced.of_plan(build_plan("zb-h1", num_ranks=2, num_microbatches=2))


def test_stages_are_merged_with_their_slices() -> None:
    costs = LengthsAndLinks(sequence_length=64, attention_share=0.2, key_share=0.1).applied(CostModel.uniform(Placement.v(2)), 4)
    merged = costs.merged(2)
    whole = LengthsAndLinks(sequence_length=64, attention_share=0.2, key_share=0.1).applied(
        CostModel.uniform(Placement.linear(2)), 4
    )
    for name, rows in whole.table.lists.items():
        for row, other in zip(rows, getattr(merged.table, name), strict=True):
            assert row == pytest.approx(other)
    assert [row[0] for row in merged.table.keys] == pytest.approx([row[0] for row in whole.table.keys])


# -- lengths of equal work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", [Work(per_token=1.0), Work(per_token=1.0, per_square=1e-4), Work(per_square=1.0), Work()])
@pytest.mark.parametrize(("tokens", "multiple"), [(4096, 1), (32768, 128), (4096, 512), (8, 1)])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_slices_have_equal_work(work: Work, tokens: int, multiple: int, n: int) -> None:
    lengths = slice_lengths(work, tokens, n, multiple=multiple)
    assert sum(lengths) == tokens
    assert len(lengths) == n
    assert min(lengths) >= multiple
    assert all(length % multiple == 0 for length in lengths)
    ends = list(itertools.accumulate(lengths))
    times = [work.at(end, end * end) - work.at(end - own, (end - own) ** 2) for own, end in zip(lengths, ends, strict=True)]
    step = work.at(tokens, tokens * tokens) - work.at(tokens - multiple, (tokens - multiple) ** 2)
    assert max(times) - min(times) <= 2 * step + 1e-9, "but for rounding to the multiple"


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="4100 tokens cannot be cut at multiples of 8"):
        slice_lengths(Work(per_token=1.0), 4100, 2, multiple=8)
    with pytest.raises(ConfigError, match="a sequence of 4 tokens has 4 tokens, which is too few for 8 slices"):
        slice_lengths(Work(per_token=1.0), 4, 8)
    with pytest.raises(ConfigError, match="64 tokens has 4 parts of 16 tokens, which is too few for 8 slices"):
        slice_lengths(Work(per_token=1.0), 64, 8, multiple=16)


@pytest.mark.parametrize(("tokens", "multiple"), [(4096, 1), (4096, 64), (1000, 8), (8, 1), (72, 8)])
def test_slices_to_measure_have_unlike_lengths(tokens: int, multiple: int) -> None:
    lengths = unlike_lengths(tokens, multiple=multiple)
    assert sum(lengths) == tokens
    assert all(length > 0 and length % multiple == 0 for length in lengths)
    assert lengths[0] >= 3 * lengths[2] or tokens < 16 * multiple
    with pytest.raises(ConfigError, match="too few for 8 slices"):
        unlike_lengths(7 * multiple, multiple=multiple)


def test_costs_of_any_slices_follow_from_measured_ones_of_unlike_lengths() -> None:
    """What a pass takes besides its tokens, attention, and memory, in one fit."""
    costs = replace(CostModel.uniform(Placement.linear(2), forward_ms=8.0, backward_ms=9.0, wgrad_ms=7.0), comm_ms=2.0)
    slicing = LengthsAndLinks(sequence_length=4096, attention_share=0.4, key_share=0.25, overhead_ms=0.5)
    pieces = slices_of_sequence(unlike_lengths(4096))
    measured = costs.with_table(slicing.by_length(costs, slicing.overhead_ms).table([pieces], key_share=slicing.key_share).of(0))
    measured = replace(measured, comm_ms=1.0)
    for n in (2, 4, 8):
        found, expected = costs_of_other_slices(measured, n), slicing.applied(costs, n)
        assert found.table.tokens == expected.table.tokens
        for name in ("forward_ms", "backward_ms", "wgrad_ms", "activation"):
            for row, other in zip(found.table.lists[name], expected.table.lists[name], strict=True):
                assert row == pytest.approx(other, rel=1e-6), name
        for row, other in zip(found.table.keys, expected.table.keys, strict=True):
            assert row == pytest.approx(other)
        assert found.forward_ms[0] == pytest.approx(8.0 + (n - 1) * 0.5)
        assert found.comm_ms == pytest.approx(max(1.0, 2.0 * max(found.table.tokens) / 4096))
    whole = costs_of_other_slices(measured, 1)
    assert (whole.num_slices, whole.comm_ms) == (1, 2.0)
    assert whole.forward_ms == pytest.approx(costs.forward_ms)
    assert whole.activation == pytest.approx(costs.activation)


def test_costs_of_slices_sum_to_those_of_the_microbatch_and_the_overhead_of_each() -> None:
    costs = CostModel.uniform(Placement.linear(2), forward_ms=8.0, backward_ms=9.0, wgrad_ms=7.0)
    plain = LengthsAndLinks(sequence_length=4096, attention_share=0.4, key_share=0.25).applied(costs, 4)
    assert plain.forward_ms == pytest.approx(costs.forward_ms)
    assert plain.activation == pytest.approx([0.75, 0.75])
    assert plain.table.keys == ((0.25,), (0.25,))
    total = [math.fsum(column) for column in zip(*(rows[0] for rows in list(plain.table.lists.values())[:3]), strict=True)]
    assert total == pytest.approx([6.0] * 4, rel=2e-3), "of equal work"
    costly = LengthsAndLinks(sequence_length=4096, overhead_ms=1.0).applied(costs, 4)
    assert costly.forward_ms == pytest.approx([8.0 + 3 * 1.0] * 2)
    assert LengthsAndLinks(sequence_length=4096, overhead_ms=1.0).applied(costs, 1) == costs
    with pytest.raises(ConfigError, match="overhead_ms is 8 and a pass takes 7 ms"):
        LengthsAndLinks(sequence_length=4096, overhead_ms=8.0).applied(costs, 4)
    with pytest.raises(ConfigError, match="key_share is 1"):
        LengthsAndLinks(sequence_length=4096, key_share=1.5)


def test_measured_costs_by_length_count() -> None:
    costs = CostModel.uniform(Placement.linear(1))
    terms = (Work(constant=0.5, per_token=0.25),)
    lists = dict.fromkeys(("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward"), terms)
    model = LengthModel(**lists)  # type: ignore[arg-type]
    found = LengthsAndLinks(sequence_length=64, model=model).applied(costs, 2)
    assert found.table.tokens == (32, 32)
    assert found.table.forward_ms == ((8.5, 8.5),)


def test_a_message_takes_a_latency_and_a_time_in_proportion_to_its_length() -> None:
    """As measured, for slices of other lengths, too; without a measurement all of it is in proportion."""
    links = dict.fromkeys(((0, 1), (1, 0)), LinkTime(2.0, 1.5))
    whole = CostModel.uniform(Placement.linear(2), forward_ms=8.0, backward_ms=8.0).with_links(links, 2)
    assert (whole.comm_ms, whole.latency_share) == (2.0, 0.25)
    cut = CostModel.from_json(json.loads(json.dumps(whole.divided(4).to_json())))
    assert (cut.comm_ms, cut.comm_ms * cut.latency_share) == pytest.approx((0.5 + 1.5 / 4, 0.5))
    assert cut.whole.comm_ms == pytest.approx(2.0)
    assert replace(whole, latency_share=0.0).divided(4).comm_ms == 0.5
    pieces = slices_of_sequence(unlike_lengths(4096))
    measured = cut.with_table(LengthModel.of(whole, tokens=4096, squares=4096.0**2).table([pieces]).of(0))
    for n in (1, 2, 8):
        found = costs_of_other_slices(replace(measured, comm_ms=2.0, latency_share=0.25), n)
        assert found.comm_ms == pytest.approx(0.5 + 1.5 * 2 / n)  # the longest measured slice is a half
