"""Gradients are reduced and weights gathered bucket by bucket while passes run, on every rank and in every chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.timeline import Activity, RankTimeline, Timeline
from tests.support.gpt import Case, Trainer, compare
from tests.support.ranks import RankPool

OVERLAPPED = Case(
    "zb-h2",
    2,
    4,
    distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    different_data=True,
    adam_eps=1.0,
)
OVERLAPPED_V = replace(OVERLAPPED, schedule="zbv", num_chunks=2)
CASES = [OVERLAPPED, OVERLAPPED_V, replace(OVERLAPPED, schedule="zb-interleaved", num_chunks=2)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gathering_while_forwards_run_changes_nothing(four_ranks: RankPool, case: Case) -> None:
    """The mean over two copies is summed in another order than in the reference, which has four: 1e-6."""
    for rank, difference in enumerate(four_ranks.run(compare, case)):
        assert difference.losses < 1e-5, (rank, difference)
        assert difference.weights < 1e-6, (rank, difference)


def _record(rank: int, case: Case) -> Timeline:
    trainer = Trainer(case)
    trainer.schedule.recordings.choose([3], done=0)  # megatron-core counts gradients in the first one, and gathers in the second
    trainer.train()
    (timeline,) = trainer.schedule.timelines()
    trainer.close()
    return timeline


@pytest.mark.parametrize("case", [OVERLAPPED, OVERLAPPED_V], ids=str)
def test_buckets_travel_while_passes_run(four_ranks: RankPool, case: Case) -> None:
    timeline = four_ranks.run(_record, replace(case, num_steps=4))[0]
    for rank, stages in zip(timeline.ranks, timeline.plan.placement.rank_to_stages, strict=True):
        for stage in stages:
            _check_reductions(rank, stage)
            _check_gathers(rank, stage)


def _check_reductions(rank: RankTimeline, stage: int) -> None:
    """Each bucket starts, from the last layers to the first, inside the stage's last W; behind it all would start at once."""
    last_w = [timed for timed in rank.ops if timed.op.stage == stage and timed.op.kind is OpKind.W][-1]
    starts = _starts(rank, Activity.REDUCE, stage)
    assert len(starts) > 3
    assert sorted(starts.values()) == list(starts.values())
    assert last_w.start_ms < starts[0]
    assert max(starts.values()) < last_w.end_ms


def _check_gathers(rank: RankTimeline, stage: int) -> None:
    """The first layers' bucket before anything else, the others one by one while the first forward runs."""
    first = next(timed for timed in rank.ops if timed.op.stage == stage)
    starts = list(reversed(_starts(rank, Activity.GATHER, stage).values()))
    assert len(starts) > 3
    assert starts[0] < min(timed.start_ms for timed in rank.ops)
    assert sorted(starts) == starts
    assert first.start_ms < starts[1]
    assert starts[-1] < first.end_ms


def _starts(rank: RankTimeline, activity: Activity, stage: int) -> dict[int, float]:
    """Of each bucket, by its index from the last layers on; every one of them ended."""
    spans = [span for span in rank.spans if span.activity is activity and span.bucket and span.bucket.stage == stage]
    assert all(span.end_ms > span.start_ms for span in spans)
    return dict(sorted((span.bucket.index, span.start_ms) for span in spans if span.bucket))
