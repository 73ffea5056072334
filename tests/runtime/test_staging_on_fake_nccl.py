"""Staging on simulated streams: the executor over gloo with copies of CUDA tensors through host memory, late in every order.

`CudaCopies` itself runs here, on streams that copy when the scheduler lets them, with threads that go on when it lets them; every
event that it records or waits for, and everything that its handles keep, is left out once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.runtime import issuer, staging, threads
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from megatron.zerobubble.runtime.staging import CudaCopies, Receiving, Sending, Staging
from tests.runtime.on_fake_nccl import Hazard, Setup
from tests.runtime.test_on_fake_nccl import outcomes, program_of
from tests.runtime.test_rules_on_fake_nccl import Forgetful
from tests.support.programs import FAMILIES

pytestmark = pytest.mark.claims(
    "Schedules",
    "on the double of NCCL: staging, with each of its events and kept tensors left out once; recorder, memory meter, clock, "
    "link times; post-validation; real training steps with DDP, the distributed optimizer and sharded gradients, every torch "
    "op traced",
    "works on the double; **not run on a GPU**",
    also=(
        "runtime/test_records_on_fake_nccl.py",
        "optimizer/test_post_validation_on_fake_nccl.py",
        "mcore/ddp/test_zero2_on_fake_nccl.py",
    ),
)

CUDA = torch.device("cuda", 0)
SEEDS = range(6)


def staged_links(*args: Any, **options: Any) -> ProcessGroupLinks:
    """Links of tensors on CUDA over gloo."""
    return ProcessGroupLinks(*args, staging=Staging(CudaCopies(CUDA), CUDA), **options)


def run_staged(name: str, p: int, seeds: range, hazard: Hazard = Hazard.NONE, **options: Any) -> dict[str, int]:
    setup = Setup(make_links=staged_links, hazard=hazard)
    return outcomes(program_of(name, p, m=6), setup, seeds, backend="fake_gloo", cuda=True, **options)


@pytest.mark.parametrize(("p", "seeds"), [(2, range(6)), (4, range(3))])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(0.5)
def test_every_family_with_copies_that_are_late(name: str, p: int, seeds: range) -> None:
    found = run_staged(name, p, seeds)
    assert found["ends"] + found["stalls"] == len(seeds), found


def test_a_synchronization_in_every_op() -> None:
    """Receives of gloo are not on the device: no placement of them can deadlock."""
    assert run_staged("zbv", 2, SEEDS, Hazard.SYNC_ALWAYS)["ends"] == len(SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("p", "num_seeds"), [(2, 200), (4, 50)])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_hundred_random_delays(name: str, p: int, num_seeds: int) -> None:
    found = run_staged(name, p, range(num_seeds))
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
        found = run_staged("zb-h1", 2, SEEDS)
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
        found = run_staged("zb-h1", 2, SEEDS)
    assert found["AssertionError"] >= len(SEEDS) - 2, found  # the copy of an arrival is started by whichever thread is first
