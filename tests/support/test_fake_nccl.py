"""The double of NCCL itself: it does what its docstrings say, and notices what they say is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fake_nccl.device import Device, Event, Stream
from tests.support.fake_nccl.engine import StuckError
from tests.support.fake_nccl.memory import OrderError
from tests.support.fake_nccl.ranks import run_ranks

SEEDS = range(9)
"""Three of each kind of lateness."""


def everywhere(function: Callable[..., Any], *args: Any, size: int = 2, **options: Any) -> None:
    for seed in SEEDS:
        run_ranks(size, function, *args, seed=seed, **options)


# -- transfers ----------------------------------------------------------------------------------------------------------------


def send_and_look(rank: int) -> None:
    """The send is not over before the receive is there, and the host goes on meanwhile."""
    first = dist.new_group()
    second = dist.new_group()
    for group in (first, second):
        if rank == 0:
            dist.send(torch.zeros(1), 1, group=group)
        else:
            dist.recv(torch.zeros(1), 0, group=group)
    if rank == 0:
        tensor = torch.arange(3.0)
        work = dist.isend(tensor, 1, group=first)
        assert work is not None
        dist.send(torch.ones(1), 1, group=second)
        assert not work.is_completed(), "rank 1 receives on the first group only when it has received on the second"
        dist.recv(torch.zeros(1), 1, group=second)
        work.wait()
        assert work.is_completed()
    else:
        dist.recv(torch.zeros(1), 0, group=second)
        dist.send(torch.zeros(1), 0, group=second)
        buffer = torch.zeros(3)
        dist.recv(buffer, 0, group=first)
        assert buffer.tolist() == [0.0, 1.0, 2.0]


def test_a_send_is_over_when_it_is_received_and_no_host_waits_for_that() -> None:
    everywhere(send_and_look)


def exchange(rank: int, send_first: bool) -> None:
    tensors = torch.full((2,), float(rank)), torch.zeros(2)
    calls = [lambda: dist.isend(tensors[0], 1 - rank), lambda: dist.irecv(tensors[1], 1 - rank)]
    works = [call() for call in (calls if send_first or rank else calls[::-1])]
    for work in works:
        assert work is not None
        work.wait()
    assert tensors[1].tolist() == [1.0 - rank] * 2


def collectives(rank: int) -> None:
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    assert value.item() == 10.0
    gathered = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    assert [tensor.item() for tensor in gathered] == [0.0, 1.0, 2.0, 3.0]
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == [0, 1, 2, 3]
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, torch.arange(8.0), op=dist.ReduceOp.AVG)
    assert part.tolist() == [2.0 * rank, 2.0 * rank + 1]
    whole = torch.zeros(8)
    dist.all_gather_single(whole, part)
    assert whole.tolist() == list(range(8))
    root = torch.tensor([7.0 if rank == 2 else 0.0])
    dist.broadcast(root, 2)
    assert root.item() == 7.0
    most = torch.tensor([float(rank)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert most.item() == 3.0
    dist.barrier()


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch before 2.13 has other names for two collectives")
def test_collectives() -> None:
    everywhere(collectives, size=4)
    everywhere(collectives, size=4, eager=True)


# -- hosts that wait ----------------------------------------------------------------------------------------------------------


def wait_behind_a_receive(rank: int, host_waits: Callable[[], object], sends_first: bool) -> None:
    """Rank 0 posts a receive and then makes its host wait; rank 1 sends before, or only when rank 0 has gone on."""
    first, second = dist.new_group(), dist.new_group()
    for group in (first, second):
        dist.all_reduce(torch.zeros(1), group=group)
    exchange(rank, False)
    tensor, token = torch.zeros(1), torch.zeros(1)
    if rank == 0:
        work = dist.irecv(tensor, 1)
        host_waits()
        dist.all_reduce(token, group=second)
        assert work is not None
        work.wait()
    elif sends_first:
        dist.send(tensor, 0)
        host_waits()
        dist.all_reduce(token, group=second)
    else:
        host_waits()
        dist.all_reduce(token, group=second)
        dist.send(tensor, 0)


def no_wait() -> None:
    """The host goes on."""


def synchronize() -> None:
    Device.current().synchronize()


def make_a_communicator() -> None:
    dist.all_reduce(torch.zeros(1), group=dist.new_group())


def test_a_host_that_waits_for_its_device_waits_for_receives_that_run() -> None:
    everywhere(wait_behind_a_receive, no_wait, False)
    for host_waits, text in (
        (synchronize, "rank 0, .*: waits for a device-wide synchronization"),
        (make_a_communicator, r"rank 0, .*: waits for its device, to make communicator 3 of ranks \[0, 1\]"),
    ):
        everywhere(wait_behind_a_receive, host_waits, True)
        for seed in SEEDS:
            with pytest.raises(StuckError, match=text):
                run_ranks(2, wait_behind_a_receive, host_waits, False, seed=seed)


# -- memory -------------------------------------------------------------------------------------------------------------------


def reuse(rank: int, keeps: str) -> None:
    """Rank 0 frees what it sends, and computes into new memory of the same size."""
    device = Device.current()
    exchange(rank, False)
    if rank == 1:
        buffer = torch.zeros(4)
        dist.recv(buffer, 0)
        assert buffer.tolist() == [1.0] * 4
        return
    tensor = device.arena.empty(4).fill_(1.0)
    address = tensor.data_ptr()
    device.compute("an op", writes=[tensor])
    work = dist.isend(tensor, 1)
    assert work is not None
    if keeps == "record_stream":
        device.arena.record_stream(tensor, _StreamOf(work))
    if keeps == "wait":
        work.wait()
    del tensor
    other = device.arena.empty(4)
    assert (other.data_ptr() == address) == (keeps != "record_stream" or work.is_completed())
    assert torch.isnan(other).all()
    device.compute("another op", writes=[other])
    other.fill_(2.0)
    work.wait()


class _StreamOf:
    """The communicator's stream, as far as `record_stream` needs it."""

    def __init__(self, work: Any) -> None:
        self._kernel = work._kernels[-1]

    def marker(self) -> Any:
        return (lambda: self._kernel.end.is_reached), self._kernel.end.clock


def test_memory_is_handed_out_again_at_once_and_must_have_been_waited_for() -> None:
    everywhere(reuse, "wait")
    everywhere(reuse, "record_stream")
    with pytest.raises(OrderError, match=r"another op writes on the compute stream, and nothing orders it after: send 3 of"):
        run_ranks(2, reuse, "")


def read_without_waiting(rank: int, waits: bool) -> None:
    exchange(rank, False)
    if rank == 0:
        dist.send(torch.ones(4), 1)
        return
    buffer = torch.zeros(8)
    work = dist.irecv(buffer[4:], 0)
    assert work is not None
    Device.current().compute("another half", reads=[buffer[:4]], writes=[buffer[:4]])
    if waits:
        work.wait()
    Device.current().compute("the same half", reads=[buffer[2:6]])
    work.wait()


def test_accesses_conflict_by_bytes() -> None:
    everywhere(read_without_waiting, True)
    for seed in SEEDS:
        with pytest.raises(
            OrderError, match="rank 1: the same half reads on the compute stream, and nothing orders it after: rec"
        ):
            run_ranks(2, read_without_waiting, False, seed=seed)


# -- streams and events ---------------------------------------------------------------------------------------------------


def copy_on_a_stream(rank: int, events: str) -> None:
    device = Device.current()
    source, target = torch.zeros(4), torch.zeros(4)
    device.compute("the source", writes=[source])
    source.fill_(1.0)
    side, before, after = Stream(device, "a side stream"), Event(), Event()
    before.record()
    if "before" in events:
        side.wait_event(before)
    side.copy(target, source)
    after.record(side)
    assert not after.query(), "the copy is queued, and nobody else has run"
    if "after" in events:
        device.current_stream().wait_event(after)
    if "host" in events:
        after.synchronize()
    device.compute("a reader", reads=[target])
    assert target.tolist() == [1.0] * 4 or "unordered" in events


def test_streams_are_ordered_by_events_only() -> None:
    everywhere(copy_on_a_stream, "before and after", size=1)
    everywhere(copy_on_a_stream, "before and host", size=1)
    for events, text in (
        ("after", "a copy on a side stream reads .*, and nothing orders it after: the source writes"),
        ("before", "a reader reads on the compute stream, and nothing orders it after: a copy on a side stream writes"),
    ):
        for seed in SEEDS:
            with pytest.raises(OrderError, match=text):
                run_ranks(1, copy_on_a_stream, events, seed=seed)
