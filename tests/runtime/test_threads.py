"""Every thread of ours has its rank's GPU as its current device before it calls CUDA."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.zerobubble.job.watchdog import Watchdog
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.runtime.issuer import Issuer
from megatron.zerobubble.runtime.threads import start_thread
from megatron.zerobubble.runtime.watch import Watch
from tests.support.fake_cuda.install import FakeCuda, fake_cuda

pytestmark = pytest.mark.claims(
    "Long runs",
    "every thread makes its rank's GPU the current one before it calls CUDA",
    "works, on a double of what CUDA keeps per thread; **not run on a GPU**",
)

PACKAGE = Path(__file__).parents[2] / "megatron" / "zerobubble"
GPU = torch.device("cuda", 3)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """CUDA as the main thread of the rank with GPU 3 leaves it. Fails if a thread without a device has called it."""
    with fake_cuda(num_devices=4) as installed:
        torch.cuda.set_device(3)
        yield installed


def test_the_watchdog_queries_events_on_its_ranks_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    queried: dict[str, set[int]] = {}
    query = torch.cuda.Event.query

    def noted(event: torch.cuda.Event) -> bool:
        queried.setdefault(threading.current_thread().name, set()).add(torch.cuda.current_device())
        return query(event)

    monkeypatch.setattr(torch.cuda.Event, "query", noted)
    watch = Watch(GPU)
    dog = Watchdog(watch, torch.distributed.HashStore(), rank=0, world_size=1, limit_s=0.1, first_limit_s=60.0)  # type: ignore[arg-type]
    with dog:
        until = time.monotonic() + 20.0
        while "watchdog" not in queried and time.monotonic() < until:
            watch.start(Op.parse("0F0"))
            time.sleep(0.01)
    assert queried["watchdog"] == {3}


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_thread_begins_on_its_device_and_without_an_index_on_that_of_the_thread_that_starts_it(
    fake: FakeCuda, device: str
) -> None:
    found: list[int] = []
    torch.cuda.set_device(3 if device == "cuda" else 1)
    start_thread(lambda: found.append(torch.cuda.current_device()), name="other", device=torch.device(device)).join()
    assert found == [3]


def test_on_the_cpu_no_thread_calls_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("there is no CUDA"))
    Issuer(torch.device("cpu")).close()


def test_no_thread_is_started_elsewhere() -> None:
    """Only what has no tensors on a GPU starts others: planning, commands with progress, the playground's server."""
    starts = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bThread(Pool\w+)?\(", path.read_text())
    }
    planning = {"mcore/microbatches/iteration_plans.py", "plan/search/search.py"}
    assert starts == {"runtime/threads.py", "cli/progress_bar.py", "playground/task_workers.py", *planning}
