"""Runs of plans with pairs, whose ops run one after the other here: the bits of the model without a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import plan_of
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.simulate import seconds_of_pairs
from tests.support.comparisons import assert_same_bits, compare, record
from tests.support.gpt import Case
from tests.support.plans import paired
from tests.support.ranks import RankPool


@dataclass(frozen=True)
class PairedCase(Case):
    """A schedule with every legal pair of its order."""

    @property
    def plan(self) -> Plan:
        return paired(plan_of(super().spec, self.num_microbatches))

    @property
    def spec(self) -> ScheduleSpec:
        return super().spec if self.schedule == "stock" else replace(super().spec, loaded_plan=self.plan)


CASES = [
    PairedCase(schedule, num_ranks, 3 * num_ranks, num_chunks=num_chunks)
    for num_ranks in (2, 4)
    for schedule, num_chunks in (("1f1b", 1), ("zb-h1", 1), ("zbv", 2))
]


@pytest.mark.claims("Schedules", "ops that run together (pairs): 1F1B, ZB-H1 and ZBV with every legal pair", "works, bit for bit")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.5)
def test_pairs_change_no_bit(four_ranks: RankPool, case: PairedCase) -> None:
    assert case.plan.pairs
    assert_same_bits(four_ranks.run(compare, case), case)


def test_a_recording_shows_the_ops_of_a_pair_at_the_same_time(four_ranks: RankPool) -> None:
    timeline = four_ranks.run(record, CASES[2])[0]
    for row, ops in zip(timeline.rows, timeline.plan.ops, strict=True):
        assert [timed.op for timed in row] == list(ops)
        assert {row[place - 1].op for place in seconds_of_pairs(row)} == timeline.plan.pairs & set(ops)
