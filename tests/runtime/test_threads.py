"""Every thread of ours has its rank's GPU as its current device before it calls CUDA."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.job.watchdog import Watchdog
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.runtime.issuer import Issuer
from megatron.zerobubble.runtime.staging import Staging
from megatron.zerobubble.runtime.threads import start_thread
from megatron.zerobubble.runtime.watch import Watch
from tests.support.cuda_threads import CudaOfThreads

PACKAGE = Path(__file__).parents[2] / "megatron" / "zerobubble"
GPU = torch.device("cuda", 3)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaOfThreads:
    """CUDA as the main thread of the rank with GPU 3 leaves it."""
    double = CudaOfThreads()
    double.install(monkeypatch)
    torch.cuda.set_device(3)
    return double


class _Copies:
    """Copies that call CUDA on whatever thread they are called on."""

    def __init__(self, cuda: CudaOfThreads) -> None:
        self._cuda = cuda

    def mark(self) -> None:
        self._cuda.touch()

    def leave(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        self._cuda.touch()
        return tensor.clone(), self._cuda.touch

    def space(self, buffer: Tensor) -> Tensor:
        return torch.empty_like(buffer)

    def arrive(self, host: Tensor, buffer: Tensor, mark: Any) -> None:
        self._cuda.touch()

    def follow(self, copied: Any) -> None:
        self._cuda.touch()


class _Done:
    """A transfer that is done at once."""

    def wait(self) -> None:
        """Return."""


def test_the_watchdog_queries_events_on_its_ranks_gpu(cuda: CudaOfThreads) -> None:
    watch = Watch(GPU)
    dog = Watchdog(watch, torch.distributed.HashStore(), rank=0, world_size=1, limit_s=0.1, first_limit_s=60.0)  # type: ignore[arg-type]
    with dog:
        until = time.monotonic() + 20.0
        while "watchdog" not in cuda.touched and time.monotonic() < until:
            watch.start(Op.parse("0F0"))
            time.sleep(0.01)
    assert cuda.touched["watchdog"] == {3}
    assert cuda.touched["MainThread"] == {3}


def test_staged_transfers_copy_on_their_ranks_gpu(cuda: CudaOfThreads) -> None:
    staging = Staging(_Copies(cuda), GPU)
    for _ in range(20):  # so that the arrivals thread gets to some before `wait` does
        sending = staging.send(torch.ones(1), lambda tensor: _Done())  # type: ignore[arg-type, return-value]
        receiving = staging.receive(torch.zeros(1), lambda tensor: _Done())  # type: ignore[arg-type, return-value]
        sending.wait()
        time.sleep(0.002)
        receiving.wait()
    staging.close()
    assert set(cuda.touched) == {"MainThread", "transfers", "arrivals"}
    assert set().union(*cuda.touched.values()) == {3}


def test_a_device_without_an_index_is_the_one_of_the_thread_that_starts(cuda: CudaOfThreads) -> None:
    start_thread(cuda.touch, name="other", device=torch.device("cuda")).join()
    assert cuda.touched == {"other": {3}}


def test_on_the_cpu_no_thread_calls_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("there is no CUDA"))
    Issuer(torch.device("cpu")).close()


def test_no_thread_is_started_elsewhere() -> None:
    """Only what has no tensors on a GPU starts others: planning, commands with progress."""
    starts = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bThread(Pool\w+)?\(", path.read_text())
    }
    planning = {"mcore/microbatches/iteration_plans.py", "plan/search/search.py"}
    assert starts == {"runtime/threads.py", "cli/progress_bar.py", *planning}
