"""Every thread of ours has its rank's GPU as its current device before it calls CUDA."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.zerobubble.errors import TransferError
from megatron.zerobubble.job.launch import read_launch
from megatron.zerobubble.job.watchdog import Watchdog
from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.runtime.issuer import Issuer
from megatron.zerobubble.runtime.recording import op_text
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
    dog = Watchdog(watch, torch.distributed.HashStore(), read_launch({}), limit_s=0.1, timeout_s=60.0)  # type: ignore[arg-type]
    with dog:
        until = time.monotonic() + 20.0
        while "watchdog" not in queried and time.monotonic() < until:
            watch.start(Op.parse("0F0"))
            time.sleep(0.01)
    assert queried["watchdog"] == {3}


@pytest.mark.parametrize(("apart_s", "num_events", "text"), [(3600.0, 4, ", or an op behind it, up to 0F2"), (0.0, 8, "")])
def test_ops_that_are_issued_at_once_share_an_event(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, apart_s: float, num_events: int, text: str
) -> None:
    """The device has begun the first op: it has passed two events. A wait shares the event of an op's end, if that has one; the
    op behind the wait has its own."""
    events: list[torch.cuda.Event] = []
    monkeypatch.setattr(torch.cuda.Event, "record", lambda event: events.append(event))
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: event in events[:2])
    watch = Watch(GPU, apart_s=apart_s)
    watch.report("begins the passes")
    for op in map(Op.parse, ("0F0", "0F1", "0F2")):
        watch.start(op)
        watch.end(op)
    watch.awaited(Message(Payload.GRADIENT, 0, 0, 1, 0))
    watch.start(Op.parse("0B0"))
    assert len(events) == num_events
    device, host = watch.current(), watch.last()
    assert device is not None
    assert device.text == f"runs {op_text(Op.parse('0F0'))}{text}"
    assert host is not None
    assert host.text == f"runs {op_text(Op.parse('0B0'))}"
    watch.quiesce()
    monkeypatch.setattr(torch.cuda.Event, "query", lambda _: pytest.fail("a CUDA graph may be being captured"))
    assert watch.current() is host


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
    """Only what has no tensors on a GPU starts others: searches, commands with progress, and the playground's server."""
    starts = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bThread(Pool\w+)?\(", path.read_text())
    }
    others = {"cli/progress_bar.py", "plan/search/search.py", "playground/server.py"}
    assert starts == {"runtime/threads.py"} | others


CPU = torch.device("cpu")


def test_calls_are_made_in_order_and_not_waited_for() -> None:
    issuer, gate, made = Issuer(CPU), threading.Event(), list[int]()

    def call(number: int) -> mock.Mock:
        gate.wait(10)
        made.append(number)
        assert threading.current_thread() is not threading.main_thread()
        return work[number]

    work = [mock.Mock() for _ in range(5)]
    issued = [issuer(lambda number=number: call(number)) for number in range(5)]
    assert not made, "all were given while the first was under way"
    gate.set()
    issued[3].wait()
    assert made[:4] == [0, 1, 2, 3]
    work[3].wait.assert_called_once_with()
    issuer.close()
    assert made == [0, 1, 2, 3, 4], "closing leaves nothing uncalled"
    work[4].wait.assert_not_called()


def test_an_error_comes_out_where_it_is_waited_for_and_the_next_call_is_made() -> None:
    issuer = Issuer(CPU)

    def fail() -> mock.Mock:
        raise TransferError("no such peer")

    failed, fine = issuer(fail), issuer(mock.Mock)
    fine.wait()
    with pytest.raises(TransferError, match="no such peer"):
        failed.wait()
    issuer.close()


def test_a_call_that_was_made_keeps_nothing_alive() -> None:
    issuer, tensor = Issuer(CPU), torch.zeros(3)
    storage = StorageWeakRef(tensor.untyped_storage())
    issued = issuer(lambda kept=tensor: mock.Mock(spec=["wait"]))  # type: ignore[misc]
    del tensor
    issued.wait()
    assert storage.expired()
    issuer.close()


def test_its_thread_ends_with_it() -> None:
    issuer, made = Issuer(CPU), list[int]()
    thread = issuer._thread
    issued = issuer(lambda: mock.Mock(side_effect=made.append(1)))
    del issuer
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    issued.wait()
    assert made == [1], "what was given before is called"


@pytest.fixture
def watch() -> Watch:
    return Watch(torch.device("cpu"))


def test_a_wait_ends_with_the_activity_around_it(watch: Watch) -> None:
    with watch.doing("steps"):
        before = watch.current()
        with watch.waits("waits for rank 3", 3):
            doing = watch.current()
            assert doing is not None
            assert (doing.text, doing.is_waiting, doing.waits_for, doing.is_limited) == ("waits for rank 3", True, 3, True)
        after = watch.current()
        assert before is not None
        assert after is not None
        assert after is not before, "what follows the wait is progress"
        assert (after.text, after.is_waiting) == ("steps", True)
    assert watch.current() is None


def test_a_wait_in_a_phase_has_no_limit_of_its_own(watch: Watch) -> None:
    with watch.phase("saves"):
        with watch.waits("waits for its peers"):
            doing = watch.current()
            assert doing is not None
            assert (doing.is_limited, doing.is_waiting, doing.waits_for) == (False, True, None)
        assert watch.last().text == "saves"


def test_after_an_error_the_wait_is_the_last_report(watch: Watch) -> None:
    with pytest.raises(ZeroDivisionError), watch.waits("waits for rank 1", 1):
        raise ZeroDivisionError
    assert watch.last().text == "waits for rank 1"
