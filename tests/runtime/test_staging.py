"""Transfers through host memory: the order of copies and calls, who is alive when, and the links and the executor on top.

The device here is made of lists: a stream is a list of things to do, and does one when the test asks for it, so that nothing
happens early by luck. What CUDA itself does with streams and events is `test_gpu`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.zerobubble.plan.communication import links_of, place_communication
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.runtime import issuer, staging, threads
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from megatron.zerobubble.runtime.staging import CudaCopies, Receiving, Sending, Staging
from tests.runtime.on_fake_nccl import Hazard, Setup
from tests.runtime.support import LabelWork, Taken
from tests.runtime.test_on_fake_nccl import Forgetful, outcomes, program_of
from tests.support.programs import FAMILIES
from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.claims(
        "Long runs",
        "CUDA tensors over gloo through host memory, copied to the device as they arrive",
        "works with a device made of lists; not tried on a GPU",
    ),
    pytest.mark.claims(
        "Schedules",
        "on the double of NCCL: staging, with each of its events and kept tensors left out once; recorder, memory meter, clock, "
        "link times; post-validation; real training steps with DDP, the distributed optimizer and sharded gradients, every torch "
        "op traced",
        "works on the double; **not run on a GPU**",
        also=(
            "runtime/test_on_fake_nccl.py",
            "optimizer/test_post_validation.py",
            "mcore/ddp/test_zero2.py",
        ),
    ),
]


CPU = torch.device("cpu")
PATIENCE_S = 20.0


class SlowCopies:
    """A device whose copies are done when the test says so, and which notes what it is asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.may_leave, self.has_arrived = threading.Event(), threading.Event()

    def mark(self) -> str:
        self.log.append("mark")
        return "here"

    def leave(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        host = torch.full_like(tensor, float("nan"))

        def settle() -> None:
            assert self.may_leave.wait(PATIENCE_S)
            host.copy_(tensor)
            self.log.append("left")

        self.log.append("leaving")
        return host, settle

    def space(self, buffer: Tensor) -> Tensor:
        return torch.full_like(buffer, float("nan"))

    def arrive(self, host: Tensor, buffer: Tensor, mark: Any) -> threading.Event:
        assert mark == "here"
        buffer.copy_(host)
        self.log.append("arrived")
        self.has_arrived.set()
        return self.has_arrived

    def follow(self, copied: threading.Event) -> None:
        assert copied is self.has_arrived
        assert copied.is_set(), "the current stream waits for a copy that nobody has started"
        self.log.append("followed")


def test_a_send_waits_for_its_copy_on_a_thread_and_never_blocks_the_rank() -> None:
    copies = SlowCopies()
    staging, backend = Staging(copies, CPU), Taken(copies.log)
    transfer = staging.send(torch.tensor([7.0]), backend)
    assert copies.log == ["leaving"], "send came back before the copy was done, and the backend has nothing"
    assert not backend.called.wait(0.05)
    copies.may_leave.set()
    assert backend.called.wait(PATIENCE_S)
    assert copies.log == ["leaving", "left", "call"]
    assert backend.given == [7.0], "what the backend was given is the copy, whole"
    backend.may_end.set()
    transfer.wait()
    staging.close()


def test_a_receive_is_posted_although_a_send_waits_for_its_copy() -> None:
    """Else two ranks that send to each other could each wait for a receive that the other posts too late."""
    copies = SlowCopies()
    staging, sent, received = Staging(copies, CPU), Taken(copies.log), Taken(copies.log)
    send = staging.send(torch.tensor([7.0]), sent)
    receive = staging.receive(torch.zeros(1), received)
    assert received.called.wait(PATIENCE_S)
    assert not sent.called.is_set()
    copies.may_leave.set()
    for taken, transfer in ((sent, send), (received, receive)):
        taken.may_end.set()
        transfer.wait()
    staging.close()


def test_a_receive_copies_after_the_message_and_after_its_buffer_was_free() -> None:
    copies = SlowCopies()
    staging, backend = Staging(copies, CPU), Taken(copies.log)
    buffer = torch.zeros(1)
    transfer = staging.receive(buffer, backend)
    assert backend.called.wait(PATIENCE_S)
    assert sorted(copies.log) == ["call", "mark"], "the point from which the buffer may be written is that of the receive"
    assert backend.host is not None
    backend.host.fill_(5.0)
    assert buffer.item() == 0.0
    backend.may_end.set()
    transfer.wait()
    assert copies.log[-2:] == ["arrived", "followed"]
    assert buffer.item() == 5.0
    staging.close()


def test_a_message_is_copied_as_soon_as_it_is_here() -> None:
    """While the rank runs an op. The current stream waits for it in `wait`, on the rank's own thread, and not before."""
    copies = SlowCopies()
    staging, backend = Staging(copies, CPU), Taken(copies.log)
    transfer = staging.receive(torch.zeros(1), backend)
    backend.may_end.set()
    assert copies.has_arrived.wait(PATIENCE_S)
    assert "followed" not in copies.log
    transfer.wait()
    assert copies.log.count("arrived") == copies.log.count("followed") == 1
    staging.close()


def test_a_message_that_is_taken_first_waits_for_no_other() -> None:
    """Which may be one that its sender only sends when this rank has gone on."""
    copies = SlowCopies()
    staging, never, now = Staging(copies, CPU), Taken(copies.log), Taken(copies.log)
    early = staging.receive(torch.zeros(1), never)
    assert never.waited.wait(PATIENCE_S), "the thread stands at the one that was asked for first"
    buffer = torch.zeros(1)
    storages = [StorageWeakRef(buffer.untyped_storage())]
    late = staging.receive(buffer, now)
    assert now.called.wait(PATIENCE_S)
    assert now.host is not None
    storages.append(StorageWeakRef(now.host.untyped_storage()))
    now.may_end.set()
    late.wait()
    del buffer, now.host
    assert all(storage.expired() for storage in storages), "the thread, which comes to it later, keeps nothing of it"
    never.may_end.set()
    early.wait()
    assert (never.num_waits, now.num_waits) == (1, 1), "gloo's work is waited for once, by one of the two threads"
    assert copies.log.count("arrived") == 2
    staging.close()


def test_a_send_keeps_its_tensor_until_it_is_let_go() -> None:
    copies = SlowCopies()
    copies.may_leave.set()
    staging, backend = Staging(copies, CPU), Taken(copies.log)
    tensor = torch.ones(1)
    storage = StorageWeakRef(tensor.untyped_storage())
    transfer = staging.send(tensor, backend)
    del tensor
    assert backend.called.wait(PATIENCE_S)
    assert not storage.expired()
    backend.may_end.set()
    transfer.wait()
    staging.close()
    del transfer
    assert storage.expired()


def test_the_error_of_a_call_is_raised_by_wait() -> None:
    copies = SlowCopies()
    copies.may_leave.set()
    staging = Staging(copies, CPU)
    broken = mock.Mock(side_effect=RuntimeError("gone"))
    for transfer in (staging.send(torch.ones(1), broken), staging.receive(torch.ones(1), broken)):
        with pytest.raises(RuntimeError, match="gone"):
            transfer.wait()
    assert "arrived" not in copies.log
    staging.close()


def test_cuda_tensors_on_gloo_are_staged_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.zerobubble.runtime import staging

    monkeypatch.setattr(staging, "CudaCopies", lambda device: SlowCopies())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    chosen = {}
    for backend in ("gloo", "nccl"):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        for device in ("cpu", "cuda:0"):
            found = staging.staging_for(torch.device(device))
            chosen[backend, device] = found is not None
            if found is not None:
                found.close()
    assert [key for key, is_staged in chosen.items() if is_staged] == [("gloo", "cuda:0")]


# -- over real process groups -------------------------------------------------------------------------------------------


def run_staged(rank: int, name: str) -> int:
    """A whole iteration and a measurement of the links, each transfer through a copy; `LabelWork` checks every value."""
    copies = SlowCopies()
    copies.may_leave.set()
    program = place_communication(build_plan(name, num_ranks=4, num_microbatches=8))
    links = ProcessGroupLinks(Placement.v(4), pipeline=range(4), rank=rank, device=CPU, staging=Staging(copies, CPU))
    work = LabelWork(program, max_sleep_s=1e-3, seed=rank)
    Executor(program, rank, links, work).run()
    assert work.ops == list(program.plan.ops[rank])
    assert work.buffers_alive == 0
    times = links.times(dict.fromkeys(links_of(Placement.v(4)), (2, 3)), torch.float32, repeats=1)
    assert all(link[0] == rank and elapsed >= 0 for link, elapsed in times.items())
    links.close()
    assert copies.log.count("left") == copies.log.count("leaving")
    return copies.log.count("arrived") - copies.log.count("left")


def test_the_executor_over_staged_links(four_ranks: RankPool) -> None:
    balance = four_ranks.run(run_staged, "zbv")
    assert sum(balance) == 0, "whatever left one rank arrived at another"


CUDA = torch.device("cuda", 0)
SEEDS = range(6)


def staged_links(*args: Any, **options: Any) -> ProcessGroupLinks:
    """Links of tensors on CUDA over gloo."""
    return ProcessGroupLinks(*args, staging=Staging(CudaCopies(CUDA), CUDA), **options)


def run_on_fake_nccl(name: str, p: int, seeds: range, hazard: Hazard = Hazard.NONE, **options: Any) -> dict[str, int]:
    setup = Setup(make_links=staged_links, hazard=hazard)
    return outcomes(program_of(name, p, m=6), setup, seeds, backend="fake_gloo", cuda=True, **options)


@pytest.mark.parametrize(("p", "seeds"), [(2, range(6)), (4, range(3))])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(0.5)
def test_every_family_with_copies_that_are_late(name: str, p: int, seeds: range) -> None:
    found = run_on_fake_nccl(name, p, seeds)
    assert found["ends"] + found["stalls"] == len(seeds), found


def test_a_synchronization_in_every_op() -> None:
    """Receives of gloo are not on the device: no placement of them can deadlock."""
    assert run_on_fake_nccl("zbv", 2, SEEDS, Hazard.SYNC_ALWAYS)["ends"] == len(SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("p", "num_seeds"), [(2, 200), (4, 50)])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_hundred_random_delays(name: str, p: int, num_seeds: int) -> None:
    found = run_on_fake_nccl(name, p, range(num_seeds))
    assert found["ends"] == num_seeds, found


# -- what orders the copies, left out ---------------------------------------------------------------------------------------


def _leave_without_waiting_for_the_tensor(self: CudaCopies, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    host = self.space(tensor)
    with torch.cuda.stream(self._leaving):
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._leaving)
    return host, copied.synchronize


_leave = CudaCopies.leave
_follow = CudaCopies.follow


def _leave_and_send_before_the_copy(self: CudaCopies, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    return _leave(self, tensor)[0], lambda: None


def _arrive_where_a_kernel_may_still_read(self: CudaCopies, host: Tensor, buffer: Tensor, mark: Any) -> Any:
    with torch.cuda.stream(self._arriving):
        buffer.copy_(host, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._arriving)
    return copied


def _wait_for_the_message_only(self: CudaCopies, copied: Any) -> None:
    """And not for its copy."""


def _keep_no_host_memory(self: Sending, tensor: Tensor, host: Tensor, issued: Any) -> None:
    self._issued, self._tensor = issued, tensor


def _copy_before_the_message(self: Receiving) -> None:
    assert self._parts is not None
    buffer, host, mark, issued = self._parts
    self._copied = self._copies.arrive(host, buffer, mark)
    issued.wait()
    self._is_here.set()


BREAKS = [
    (CudaCopies, "leave", _leave_without_waiting_for_the_tensor, "OrderError"),
    (CudaCopies, "leave", _leave_and_send_before_the_copy, "OrderError"),
    (CudaCopies, "arrive", _arrive_where_a_kernel_may_still_read, "OrderError"),
    (CudaCopies, "follow", _wait_for_the_message_only, "OrderError"),
    (Sending, "__init__", _keep_no_host_memory, "FreedError"),
    (Receiving, "wait", _copy_before_the_message, "OrderError"),
]


@pytest.mark.parametrize(("owner", "name", "broken", "error"), BREAKS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_missing_order_of_copies_is_noticed(owner: type, name: str, broken: Callable[..., Any], error: str) -> None:
    with mock.patch.object(owner, name, broken):
        found = run_on_fake_nccl("zb-h1", 2, SEEDS)
    assert found[error] == len(SEEDS), found


def _keep_no_tensor(self: Sending, tensor: Tensor, host: Tensor, issued: Any) -> None:
    self._issued, self._host = issued, host


def test_a_tensor_that_is_freed_before_its_copy_is_noticed() -> None:
    """Neither the links' handle nor staging's keeps it."""
    setup = Setup(make_links=staged_links, links=Forgetful)
    with mock.patch.object(Sending, "__init__", _keep_no_tensor):
        found = outcomes(program_of("zb-h1", 2, m=6), setup, SEEDS, backend="fake_gloo", cuda=True)
    assert found["OrderError"] == len(SEEDS), found


# -- D5: threads that did not make their rank's GPU the current device ------------------------------------------------------


def _start_as_before(function: Callable[[], object], *, name: str, device: torch.device) -> None:
    threads.threading.Thread(target=function, name=name, daemon=True).start()


@pytest.mark.parametrize("owner", [staging, issuer], ids=["arrivals", "issuer"])
def test_threads_that_leave_gpu_0_current_are_noticed(owner: Any) -> None:
    with mock.patch.object(owner, "start_thread", _start_as_before):
        found = run_on_fake_nccl("zb-h1", 2, SEEDS)
    assert found["AssertionError"] >= len(SEEDS) - 2, found  # the copy of an arrival is started by whichever thread is first
