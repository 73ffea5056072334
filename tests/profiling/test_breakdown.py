"""The breakdown of a rank's time: sums that must match, and a small recording that a person can check."""

from __future__ import annotations

import pytest

from megatron.zerobubble.plan.communication import Message, Payload, links_of
from megatron.zerobubble.plan.ir import Op, Placement, Plan
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.simulate import TimedOp
from megatron.zerobubble.plan.timeline import Activity, RankTimeline, Timeline
from megatron.zerobubble.profiling.breakdown import RankRecord, link_times, rank_records, rank_times
from tests.profiling.support import as_recorded, span


def row(*words: str) -> tuple[TimedOp, ...]:
    """From words like ``0F0@1..2``."""
    ops = []
    for word in words:
        op, _, times = word.partition("@")
        start, _, end = times.partition("..")
        ops.append(TimedOp(Op.parse(op), float(start), float(end)))
    return tuple(ops)


FORWARD = Message(Payload.ACTIVATION, 1, 0, 0, 1)
BACKWARD = Message(Payload.GRADIENT, 0, 0, 1, 0)


def small() -> Timeline:
    """Two ranks, two microbatches. Rank 0 validates for 0.5 ms, and waits 3 ms for a gradient that is sent 2 ms into the wait."""
    plan = Plan.of(
        "zb-h1",
        Placement.linear(2),
        2,
        [[Op.parse(word) for word in text.split()] for text in ("0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1B0 1W0 1F1 1B1 1W1")],
    )
    first = RankTimeline(
        ops=row("0F0@10..11", "0F1@12..13", "0B0@17..19", "0W0@19..20", "0B1@21..23", "0W1@24..24.5"),
        spans=(
            span(Activity.REWIND, 8, 9.5),
            span(Activity.VALIDATE, 11.25, 11.75),
            span(Activity.WAIT, 13.5, 16.5, BACKWARD),
            span(Activity.SEND, 11, 14, FORWARD),
            span(Activity.GRADIENTS, 24.5, 25),
            span(Activity.OPTIMIZER, 25, 28),
        ),
    )
    second = RankTimeline(
        ops=row("1F0@11.5..13", "1B0@13..15.5", "1W0@15.5..16", "1F1@16..17", "1B1@18..20", "1W1@20..26"),
        spans=(
            span(Activity.WAIT, 10.5, 11.5, FORWARD),
            span(Activity.SEND, 15.5, 21, BACKWARD),
            span(Activity.OPTIMIZER, 26, 27),
        ),
    )
    return Timeline(iteration=3, plan=plan, ranks=(first, second))


def causes_of(record: RankRecord) -> tuple[float, ...]:
    return record.idle_for_peer_ms, record.idle_for_link_ms, record.idle_for_validation_ms, record.idle_other_ms


def test_a_small_recording() -> None:
    first, second = rank_records(small())
    assert (first.forward_ms, first.backward_ms, first.wgrad_ms) == (2.0, 4.0, 1.5)
    assert (first.idle_warmup_ms, first.idle_steady_ms, first.idle_cooldown_ms) == (1.0 + 4.0, 0.0, 1.0 + 1.0)
    assert causes_of(first) == (2.0, 1.0, 0.5, 3.5)
    assert (first.starts_after_ms, first.ends_before_ms) == (0.0, 1.5)
    assert (first.rewind_ms, first.gradients_ms, first.optimizer_ms, first.optimizer_ahead_ms) == (1.5, 0.5, 3.0, 1.0)
    assert (second.idle_warmup_ms, second.idle_steady_ms, second.idle_cooldown_ms) == (0.0, 0.0, 1.0)
    assert causes_of(second) == (0.0, 0.0, 0.0, 1.0)
    assert second.starts_after_ms == 1.5
    assert second.wgrad_share == 6.5 / 13.5


def test_idle_between_the_first_backward_and_the_last_forward_is_steady() -> None:
    (time,) = rank_times([row("0F0@0..1", "0B0@2..3", "0F1@5..6", "0B1@9..10")])
    assert (time.idle_warmup_ms, time.idle_steady_ms, time.idle_cooldown_ms) == (1.0, 2.0, 3.0)


def test_a_link_is_timed_where_its_receiver_waited_for_the_sender() -> None:
    assert link_times(small()) == {(0, 1): 0.5, (1, 0): 1.0}
    assert set(link_times(as_recorded("zbv", 2, 6, comm_ms=0.0)).values()) == {0.0}


@pytest.mark.parametrize("m", [1, 2, 9])
@pytest.mark.parametrize("name", [info.name for info in known_schedules()])
def test_the_parts_add_up(name: str, m: int) -> None:
    timeline = as_recorded(name, 3, m)
    makespan = max(each[-1].end_ms for each in timeline.rows) - min(each[0].start_ms for each in timeline.rows)
    for time in rank_records(timeline):
        assert time.starts_after_ms + time.busy_ms + time.idle_ms + time.ends_before_ms == pytest.approx(makespan)
        assert sum(causes_of(time)) == pytest.approx(time.idle_ms)
        # A simulation idles for messages only, and a link never takes longer than its costs.
        assert time.idle_other_ms == pytest.approx(0.0, abs=1e-9)
        assert min(*causes_of(time)[:2], time.idle_warmup_ms, time.idle_cooldown_ms) >= 0.0
    assert link_times(timeline) == pytest.approx(dict.fromkeys(links_of(timeline.plan.placement), 0.25))
