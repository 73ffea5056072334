"""What a real schedule records on gloo ranks: all ranks on one clock, every op and transfer in its place."""

from __future__ import annotations

import json

import pytest

from megatron.zerobubble.plan.dependencies import requirements
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.timeline import Activity, Timeline
from megatron.zerobubble.profiling.breakdown import rank_records
from megatron.zerobubble.profiling.report import report
from tests.support.gpt import Case, Trainer
from tests.support.ranks import RankPool
from tests.support.traces import check_trace

pytestmark = pytest.mark.claims(
    "Long runs",
    "passes of megatron-core's own 1F1B (p 2 and 4) and interleaved 1F1B (p 4) recorded: every pass in the plan's order",
    "works",
    also=("training/test_runs.py",),
)

CASES = [Case("zbv", 4, 5, num_chunks=2, num_steps=3), Case("interleaved-1f1b", 4, 4, num_chunks=2, num_steps=3)]


def _record(rank: int, case: Case) -> tuple[list[Timeline], float]:
    trainer = Trainer(case)
    trainer.schedule.recordings.choose([1, 2], done=0)
    trainer.train()
    timelines = trainer.schedule.timelines()
    offset_ms = trainer.schedule._clock_offset_ms()
    trainer.close()
    return timelines, offset_ms


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_iterations_of_a_real_run(four_ranks: RankPool, case: Case) -> None:
    results = four_ranks.run(_record, case)
    timelines, _ = results[0]
    assert [offset_ms for _, offset_ms in results] == [0.0] * 4
    assert all(others == timelines for others, _ in results)
    assert [timeline.iteration for timeline in timelines] == [1, 2]
    events = json.loads(render_trace(timelines))["traceEvents"]
    check_trace(events, timelines[0].plan, iterations=[1, 2])
    for timeline in timelines:
        _check_order(timeline)
        for record in rank_records(timeline):
            assert min(record.idle_for_peer_ms, record.idle_for_link_ms, record.gradients_ms) >= 0.0


STOCK = [Case("stock", 4, 6, num_steps=3), Case("stock", 4, 4, num_chunks=2, num_steps=3)]


@pytest.mark.parametrize("case", STOCK, ids=["1f1b", "interleaved"])
def test_passes_of_megatron_cores_own_schedules(four_ranks: RankPool, case: Case) -> None:
    """Every pass once, in the order of the plan, and none before the pass that it needs. Timers that were there stay."""
    results = four_ranks.run(_record, case)
    timelines, _ = results[0]
    assert [offset_ms for _, offset_ms in results] == [0.0] * 4
    assert all(others == timelines for others, _ in results)
    assert [timeline.iteration for timeline in timelines] == [1, 2]
    for timeline in timelines:
        plan = timeline.plan
        assert plan.schedule == ("1f1b" if case.num_chunks == 1 else "interleaved-1f1b")
        assert [[timed.op for timed in row] for row in timeline.rows] == [list(row) for row in plan.ops]
        ends = {timed.op: timed.end_ms for row in timeline.rows for timed in row}
        for row in timeline.rows:
            for timed in row:
                needs = [need for need in requirements(timed.op, plan.num_stages) if need in ends]
                assert all(ends[need] <= timed.end_ms for need in needs)
        seen = report(timeline)
        assert 0.0 < seen.bubble_rate < 1.0
        assert seen.wgrad_share == 0.0
    json.loads(render_trace(timelines))


def _check_order(timeline: Timeline) -> None:
    """The ranks share a host, and so a clock: no message is taken before it was sent."""
    sent = {span.message: span.start_ms for rank in timeline.ranks for span in rank.spans if span.activity is Activity.SEND}
    for rank in timeline.ranks:
        for span in rank.spans:
            if span.activity is Activity.WAIT:
                assert span.end_ms >= sent[span.message]
