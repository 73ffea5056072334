"""A process per block: results come back, failures stay with their block, nothing is left behind.

The blocks here are functions that stand for `run_block`: they train nothing, and end in every way in which a block can end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.zerobubble.bench import workers as module
from megatron.zerobubble.bench.workers import BlockFailure, Interrupted, Workers
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.error_file import write_error_file
from megatron.zerobubble.job.failure import JobGuard
from megatron.zerobubble.job.launch import Launch

Run = Callable[..., Any]


class Request:
    """Stands for a `BlockRequest`: only its number is read."""

    def __init__(self, number: int) -> None:
        self.number = number


def launch(rank: int = 0, world_size: int = 1) -> Launch:
    return Launch(rank=rank, local_rank=rank, ranks_on_host=world_size, world_size=world_size)


def one(run: Run, folder: Path, *, number: int = 0, tick: Callable[[], None] = lambda: None) -> Any:
    """Run one block on a job of one rank."""
    worker = Workers(launch(), dist.HashStore(), folder, run=run)  # type: ignore[attr-defined]
    return worker.run(Request(number), tick=tick)  # type: ignore[arg-type]


def two(runs: tuple[Run, Run], folder: Path) -> list[Any]:
    """Run one block on two ranks, each in a thread here, with children of their own."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    outcomes: list[Any] = [None, None]

    def serve(rank: int) -> None:
        worker = Workers(launch(rank, 2), store, folder, run=runs[rank])
        outcomes[rank] = worker.run(Request(0), tick=lambda: None)  # type: ignore[arg-type]

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def succeeds(request: Any, launch: Launch, *, tick: Callable[[], None], end: Any) -> Any:
    for _ in range(3):
        tick()
    os.write(1, b"hello from the block\n")
    end({"pid": os.getpid()})


def raises(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
    raise RuntimeError("CUDA out of memory.\nTried to allocate 20.00 GiB")


def refuses(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
    raise ConfigError("--bf16 is given, but the device cannot")


def reports_and_leaves(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
    """As a `JobGuard` on the first rank that fails."""
    write_error_file(launch.error_file, "rank 0 failed: ValueError: the cause")
    os._exit(1)


def loses_its_peer(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
    """As a `JobGuard` on a rank that only lost another one."""
    os._exit(1)


def raises_for_its_peer(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
    time.sleep(1.0)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")


def leaves(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
    os.write(2, b"usage: script\nno such flag\n\n")
    os._exit(3)


def fails_under_a_guard(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
    log = os.fdopen(2, "w", closefd=False)  # sys.stderr is pytest's here
    with JobGuard(dist.HashStore(), launch.rank, error_file=launch.error_file, stream=log):  # type: ignore[attr-defined]
        raise ValueError("the cause")


def is_killed(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(request: Any, launch: Launch, *, tick: Callable[[], None], end: Any) -> Any:
    tick()
    time.sleep(600)


def test_the_result_comes_back_from_a_process_of_its_own(tmp_path: Path) -> None:
    ticks: list[None] = []
    result = one(succeeds, tmp_path, tick=lambda: ticks.append(None))
    assert result["pid"] != os.getpid()
    assert len(ticks) == 3
    assert (tmp_path / "block-0-rank-0.log").read_text() == "hello from the block\n"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (raises, f"rank 0: RuntimeError: CUDA out of memory. Tried to allocate 20.00 GiB ({__file__}:"),
        (refuses, "--bf16 is given, but the device cannot"),
        (reports_and_leaves, "rank 0 failed: ValueError: the cause"),
        (is_killed, "rank 0 was ended by SIGKILL: the machine may have run out of memory (see"),
        (leaves, "rank 0 exited with code 3, its last line: no such flag (see "),
        (fails_under_a_guard, f"rank 0 failed: ValueError: the cause ({__file__}:"),
    ],
)
def test_a_failure_is_one_line(run: Run, reason: str, tmp_path: Path) -> None:
    found = one(run, tmp_path)
    assert isinstance(found, BlockFailure)
    assert found.reason.startswith(reason)
    assert "\n" not in found.reason


def test_a_block_after_a_failure_runs(tmp_path: Path) -> None:
    worker = Workers(launch(), dist.HashStore(), tmp_path, run=raises)  # type: ignore[attr-defined]
    assert isinstance(worker.run(Request(0), tick=lambda: None), BlockFailure)  # type: ignore[arg-type]
    worker._run = succeeds
    assert isinstance(worker.run(Request(1), tick=lambda: None), dict)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ((raises, hangs), "rank 0: RuntimeError: CUDA out of memory."),
        ((loses_its_peer, reports_and_leaves), "rank 0 failed: ValueError: the cause"),
        ((raises_for_its_peer, reports_and_leaves), "rank 0 failed: ValueError: the cause"),
        ((raises_for_its_peer, leaves), "rank 1 exited with code 3, its last line: no such flag"),
        ((hangs, is_killed), "rank 1 was ended by SIGKILL"),
        ((succeeds, raises), "rank 1: RuntimeError: CUDA out of memory."),
    ],
)
def test_all_ranks_learn_the_cause_and_end(
    runs: tuple[Run, Run], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 1.0)
    outcomes = two(runs, tmp_path)
    assert all(isinstance(found, BlockFailure) for found in outcomes)
    assert outcomes[0].reason == outcomes[1].reason
    assert outcomes[0].reason.startswith(reason)


def test_a_signal_ends_the_child_and_the_comparison(tmp_path: Path) -> None:
    worker = Workers(launch(), dist.HashStore(), tmp_path, run=hangs)  # type: ignore[attr-defined]
    before, others = signal.getsignal(signal.SIGTERM), set(multiprocessing.active_children())
    with pytest.raises(Interrupted), worker.interruptible():
        worker.run(Request(0), tick=lambda: os.kill(os.getpid(), signal.SIGTERM))  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is before
    assert set(multiprocessing.active_children()) == others, "pools of other tests"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """Also where the parent is killed, and cannot end it."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:

        def notes_its_pid(request: Any, launch: Launch, *, tick: Any, end: Any) -> Any:
            os.write(writing, f"{os.getpid()}\n".encode())
            time.sleep(600)

        one(notes_its_pid, tmp_path)
        os._exit(0)
    child = int(os.read(reading, 32))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent")
