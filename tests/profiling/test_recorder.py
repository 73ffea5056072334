"""The recorder records the ops that ran, in their order and with their times."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext

import pytest
import torch

from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.plan.timeline import Activity
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.profiling.recorder import OpRecorder
from tests.support.fake_cuda.install import fake_cuda

OPS = [Op.parse(text) for text in ("0F0", "0F1", "0B0", "0W0", "0B1", "0W1")]


def test_order_and_times_on_the_hosts_clock() -> None:
    recorder = OpRecorder(torch.device("cpu"))
    before = time.perf_counter() * 1000.0
    recorder.clear()
    for op in OPS:
        recorder.start(op)
        time.sleep(0.002)
        recorder.end(op)
        time.sleep(0.001)
    after = time.perf_counter() * 1000.0
    timed = recorder.timed_ops()
    assert [row.op for row in timed] == OPS
    assert before <= recorder.origin_ms <= timed[0].start_ms
    assert timed[-1].end_ms <= after
    for row in timed:
        assert row.end_ms - row.start_ms >= 2.0
    for earlier, later in itertools.pairwise(timed):
        assert later.start_ms - earlier.end_ms >= 1.0
    assert recorder.timed_ops() == timed


def test_clear_begins_a_new_iteration() -> None:
    recorder = OpRecorder(torch.device("cpu"))
    assert recorder.timed_ops() == []
    for iteration in range(2):
        recorder.clear()
        origin = recorder.origin_ms
        for op in OPS[: 2 + iteration]:
            recorder.start(op)
            recorder.end(op)
        assert [row.op for row in recorder.timed_ops()] == OPS[: 2 + iteration]
        assert all(row.start_ms >= origin for row in recorder.timed_ops())
    recorder.clear()
    assert recorder.timed_ops() == []


def test_an_op_that_raised_is_not_recorded() -> None:
    recorder = OpRecorder(torch.device("cpu"))
    recorder.clear()
    recorder.start(OPS[0])
    recorder.start(OPS[1])
    recorder.end(OPS[1])
    (row,) = recorder.timed_ops()
    assert row.op == OPS[1]


MESSAGE = Message(Payload.ACTIVATION, 1, 0, 0, 1)


def test_transfers_and_waits_are_spans() -> None:
    recorder = OpRecorder(torch.device("cpu"))
    with recorder.span(Activity.OPTIMIZER):
        pass
    recorder.clear()
    recorder.posted(MESSAGE)
    recorder.awaited(MESSAGE)
    recorder.taken(MESSAGE)
    recorder.sent(MESSAGE)
    with recorder.span(Activity.VALIDATE):
        recorder.retired(MESSAGE)
    recorder.pause()
    with recorder.span(Activity.OPTIMIZER):
        pass
    spans = {span.activity: span for span in recorder.timeline().spans}
    assert list(spans) == [Activity.WAIT, Activity.RECEIVE, Activity.SEND, Activity.VALIDATE], (
        "nothing is recorded outside of an iteration"
    )
    assert spans[Activity.RECEIVE].start_ms <= spans[Activity.WAIT].start_ms
    assert spans[Activity.RECEIVE].end_ms == spans[Activity.WAIT].end_ms <= spans[Activity.SEND].start_ms
    assert spans[Activity.SEND].start_ms <= spans[Activity.VALIDATE].start_ms <= spans[Activity.SEND].end_ms
    assert [spans[activity].message for activity in spans] == [MESSAGE] * 3 + [None]


@pytest.mark.parametrize("num_ops", [0, 2])
def test_discarded_ops_become_one_span(num_ops: int) -> None:
    """Also on a rank that had run no op: it received messages that others had sent."""
    recorder = OpRecorder(torch.device("cpu"))
    recorder.clear()
    for op in OPS[:num_ops]:
        recorder.start(op)
        recorder.end(op)
    with recorder.span(Activity.VALIDATE):
        pass
    first = recorder.timed_ops()[:1]
    for call in (recorder.posted, recorder.awaited, recorder.taken, recorder.sent):
        call(MESSAGE)
    recorder.rewind()
    recorder.start(OPS[0])
    recorder.end(OPS[0])
    timeline = recorder.timeline()
    assert [timed.op for timed in timeline.ops] == [OPS[0]]
    assert [span.activity for span in timeline.spans] == [Activity.VALIDATE] + [Activity.REWIND] * (num_ops > 0)
    if num_ops:
        assert timeline.spans[1].start_ms == first[0].start_ms
        assert timeline.spans[1].end_ms <= timeline.ops[0].start_ms


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_to_alls_with_nothing_beside_them_are_measured(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """By a clock that is set: a pair whose B ends at 7, with W beside an all-to-all of F from 9 to 10; and a B alone."""
    now_ms = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_ms / 1000.0)
    with nullcontext() if device == "cpu" else fake_cuda():
        if device == "cuda":
            torch.cuda.set_device(0)
        recorder, profiler = OpRecorder(torch.device(device)), Profiler(torch.device(device))
        recorder.clear()
        pair = ((1, -1), (3, -1), (4, 1), (6, 1), (7, -1), (8, -1), (9, 1), (10, -1), (11, 1), (12, -1))
        for ops, seen_by, begin, end, changes in (
            (OPS[1:3], [recorder], 0.0, 12.0, pair),
            (OPS[4:5], [recorder, profiler], 20.0, 24.0, ((21, -1), (22, 1))),
        ):
            for at_ms, name, arguments in (
                *((begin, "start", op) for op in ops),
                *((at, "computes", change) for at, change in changes),
                *((end, "end", op) for op in ops),
            ):
                now_ms = at_ms
                for each in seen_by:
                    getattr(each, name)(arguments)
        spans, profile = recorder.timeline().spans, profiler.profile()
    assert {span.activity for span in spans} == {Activity.ALL_TO_ALL}
    assert [(span.start_ms, span.end_ms) for span in spans] == [
        pytest.approx(each) for each in ((3, 4), (8, 9), (10, 11), (21, 22))
    ]
    assert (profile.times_ms, profile.all_to_all_ms) == ({(0, OpKind.B): pytest.approx(4)}, {(0, OpKind.B): pytest.approx(1)})


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_devices_time_that_counts() -> None:
    device = torch.device("cuda", 0)
    matrix = torch.randn(4096, 4096, device=device)
    recorder = OpRecorder(device)
    for _ in range(2):
        recorder.clear()
        start = time.perf_counter()
        for op in OPS:
            recorder.start(op)
            for _ in range(10):
                matrix @ matrix
            recorder.end(op)
        issued_ms = (time.perf_counter() - start) * 1000.0
        timed = recorder.timed_ops()
        done = time.perf_counter() * 1000.0
    assert [row.op for row in timed] == OPS
    assert all(earlier.end_ms <= later.start_ms + 0.01 for earlier, later in itertools.pairwise(timed))
    assert recorder.origin_ms <= timed[0].start_ms + 0.5
    assert timed[-1].end_ms <= done + 0.5
    assert sum(row.end_ms - row.start_ms for row in timed) > issued_ms, "the host was stalled, or its time was measured"


@pytest.mark.gpu
def test_on_a_gpu_a_wait_is_a_wait_of_the_stream() -> None:
    device = torch.device("cuda", 0)
    matrix, side = torch.randn(4096, 4096, device=device), torch.cuda.Stream(device)
    recorder = OpRecorder(device)
    for _ in range(2):
        recorder.clear()
        recorder.posted(MESSAGE)
        with torch.cuda.stream(side):
            for _ in range(50):
                matrix @ matrix
            arrived = side.record_event()
        start = time.perf_counter()
        recorder.awaited(MESSAGE)
        torch.cuda.current_stream().wait_event(arrived)
        recorder.taken(MESSAGE)
        issued_ms = (time.perf_counter() - start) * 1000.0
        wait, receive = recorder.timeline().spans
    assert (wait.activity, receive.activity) == (Activity.WAIT, Activity.RECEIVE)
    assert wait.end_ms - wait.start_ms > issued_ms, "the host was stalled, or its time was measured"
    assert receive.start_ms <= wait.start_ms
