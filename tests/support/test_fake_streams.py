"""The fake streams and events: order by clocks, work that ends later, threads without a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.fake_cuda import clocks
from tests.support.fake_cuda.clocks import FakeCudaError, Machine
from tests.support.fake_cuda.streams import Event, Stream, current_stream, set_stream, stream


@pytest.fixture
def fake() -> Iterator[Machine]:
    made = Machine(num_devices=2, timeout_s=5.0)
    made.thread().device = 0
    before = clocks.install(made)
    yield made
    clocks.install(before)


def test_work_on_two_streams_is_ordered_by_an_event_alone(fake: Machine) -> None:
    one, other = Stream(), Stream()
    first = fake.launch(one)
    fake.launch(other)
    assert not first.is_before(other.clock)
    other.wait_event(one.record_event())
    fake.launch(other)
    assert first.is_before(other.clock)


def test_a_wait_is_for_what_was_recorded_and_no_more(fake: Machine) -> None:
    one, other = Stream(), Stream()
    event = one.record_event()
    later = fake.launch(one)
    other.wait_event(event)
    assert not later.is_before(other.clock)
    other.wait_stream(one)
    assert later.is_before(other.clock)


def test_a_host_that_synchronized_orders_its_later_work_and_no_other_threads(fake: Machine) -> None:
    one, other, third = Stream(), Stream(), Stream()
    first = fake.launch(one)
    one.synchronize()
    fake.launch(other)
    assert first.is_before(other.clock)

    def elsewhere() -> None:
        fake.thread().device = 0
        fake.launch(third)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not first.is_before(third.clock)


def test_work_handed_to_a_thread_is_ordered_where_it_is_declared(fake: Machine) -> None:
    one, other = Stream(), Stream()
    first = fake.launch(one)
    one.synchronize()
    known = fake.handed_over()

    def elsewhere() -> None:
        fake.thread().device = 0
        fake.take_over(known)
        fake.launch(other)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert first.is_before(other.clock)


def test_work_that_ends_later_holds_up_events_computation_and_the_host(fake: Machine) -> None:
    link = Stream()
    compute = current_stream()
    work = link.enqueue("a transfer")
    done = link.record_event()
    compute.wait_event(done)
    behind = compute.record_event()
    assert not any(waits.query() for waits in (done, behind, compute, link))
    blocked = threading.Thread(target=lambda: fake.launch(compute))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    work.finish()
    blocked.join()
    assert done.query()
    assert behind.query()
    assert link.query()
    fake.synchronize(0)
    assert work.stamp.is_before(fake.thread().clock)


def test_transfers_of_a_stream_take_turns(fake: Machine) -> None:
    link = Stream()
    first, second = link.enqueue("first"), link.enqueue("second")
    assert second.behind == (first,)
    first.finish()
    second.wait_turn()


def test_a_failed_transfer_fails_who_waits(fake: Machine) -> None:
    link = Stream()
    link.enqueue("a transfer").finish(RuntimeError("the peer is gone"))
    assert link.query()  # as CUDA: an error does not keep a stream busy
    work = link.enqueue("another")
    event = link.record_event()
    threading.Timer(0.05, work.finish, [RuntimeError("the peer is gone")]).start()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        event.synchronize()


def test_a_host_that_waits_for_ever_fails(fake: Machine) -> None:
    fake.timeout_s = 0.05
    link = Stream()
    link.enqueue("recv from rank 1")
    with pytest.raises(FakeCudaError, match="recv from rank 1 has not ended"):
        link.synchronize()


def test_synchronizing_is_reported_and_waiting_on_the_device_is_not(fake: Machine) -> None:
    calls: list[str] = []
    fake.host_syncs.append(calls.append)
    one, event = Stream(), Event()
    event.record(one)
    one.wait_stream(current_stream())
    event.wait()
    assert event.query()
    assert calls == []
    one.synchronize()
    event.synchronize()
    fake.synchronize(0)
    assert calls == ["Stream.synchronize", "Event.synchronize", "torch.cuda.synchronize"]


def test_a_thread_without_a_device_fails_by_name(fake: Machine) -> None:
    event = Event()
    event.record()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            event.query()
        except FakeCudaError as error:
            errors.append(error)

    thread = threading.Thread(target=look, name="watchdog")
    thread.start()
    thread.join()
    assert "'watchdog' calls Event.query and has not called torch.cuda.set_device" in str(errors)


def test_times_are_those_of_timing_events_that_are_over(fake: Machine) -> None:
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    work = current_stream().enqueue("a transfer")
    end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    work.finish()
    assert start.elapsed_time(end) >= 0.0
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(Event())


def test_the_current_stream_is_of_one_thread_and_one_device(fake: Machine) -> None:
    mine, elsewhere = Stream(), Stream(device=1)
    with stream(mine):
        assert current_stream() is mine
        with stream(elsewhere):
            assert fake.thread().device == 1
            assert current_stream() is elsewhere
        assert fake.thread().device == 0
        assert current_stream() is mine
        assert current_stream(1).stream_id == 0
    assert current_stream().stream_id == 0
    set_stream(mine)
    assert current_stream() is mine
