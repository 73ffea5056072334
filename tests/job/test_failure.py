"""A rank that fails ends the job: at once, with its own traceback on top."""

from __future__ import annotations

import argparse
import io
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.zerobubble.errors import ConfigError, TransferError
from megatron.zerobubble.job import failure
from megatron.zerobubble.job.error_file import read_error_file
from megatron.zerobubble.job.failure import JobGuard, RankFailure, first_to_fail, who_failed
from megatron.zerobubble.job.heartbeats import publish, this_host
from megatron.zerobubble.machine import process_state
from megatron.zerobubble.runtime.watch import Doing
from tests.job.test_watchdog import WAITS, beat


def _no_pause(seconds: float) -> None:
    """In place of waiting for the rank that failed first."""


def _raised_from(error: Exception, cause: Exception) -> Exception:
    """As a library raises an error of its own about another one."""
    error.__cause__ = cause
    return error


def report(error: Exception, *, rank: int = 0, store: object | None = None) -> tuple[list[int], str]:
    """(exit codes, what was said) of a guard around `error`."""
    left: list[int] = []
    said = io.StringIO()
    try:
        with JobGuard(store or torch.distributed.HashStore(), rank, leave=left.append, stream=said, pause=_no_pause):  # type: ignore[arg-type]
            raise error
    except type(error):
        pass
    return left, said.getvalue()


def test_the_first_to_fail_shows_its_traceback() -> None:
    left, said = report(ZeroDivisionError("why"), rank=3)
    assert left == [1]
    assert said.startswith("rank 3 failed:\nTraceback")
    assert said.rstrip().endswith("ZeroDivisionError: why")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:1234"),
        torch.distributed.DistNetworkError("lost"),
        TransferError("stage 2, microbatch 1: send failed"),
        _raised_from(Exception("the dataset failed to build"), RuntimeError("[pair.cc:553] Connection closed by peer")),
    ],
)
def test_a_rank_that_lost_a_peer_prints_one_line(error: Exception) -> None:
    store = torch.distributed.HashStore()
    report(ZeroDivisionError("why"), rank=1, store=store)
    left, said = report(error, rank=2, store=store)
    assert left == [1]
    assert said == "rank 2 stops: rank 1 failed: ZeroDivisionError: why\n"


def test_only_a_later_failure_waits_so_that_the_first_one_is_the_first_to_exit() -> None:
    """Else torchrun would end the job before the first one has left its reason."""
    store, events = torch.distributed.HashStore(), []
    for rank in (1, 2):
        guard = JobGuard(
            store,  # type: ignore[arg-type]
            rank,
            leave=lambda code, rank=rank: events.append(f"{rank} leaves"),  # type: ignore[misc]
            stream=io.StringIO(),
            pause=lambda seconds, rank=rank: events.append(f"{rank} waits"),  # type: ignore[misc]
        )
        with pytest.raises(KeyError), guard:
            raise KeyError("why")
    assert events == ["1 leaves", "2 waits", "2 leaves"]


def test_a_second_failure_of_its_own_is_shown() -> None:
    store = torch.distributed.HashStore()
    report(ZeroDivisionError("why"), rank=1, store=store)
    _, said = report(KeyError("another"), rank=2, store=store)
    assert "KeyError: 'another'" in said


def test_an_error_of_the_user_is_one_line_once() -> None:
    store = torch.distributed.HashStore()
    assert report(ConfigError("wrong flag"), rank=1, store=store) == ([2], "error: wrong flag\n")
    assert report(ConfigError("wrong flag"), rank=0, store=store) == ([2], "")


def _exits_by_argparse() -> None:
    argparse.ArgumentParser("pretrain.py").parse_args(["--bogus"])


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda: sys.exit(3), rf"exit code 3 by {re.escape(__file__)}, line \d+; what it printed before says why"),
        (lambda: sys.exit("no data in /data"), "no data in /data"),
        (_exits_by_argparse, "pretrain.py: error: unrecognized arguments: --bogus"),
    ],
)
def test_a_script_that_ends_a_rank_itself_is_the_reason_of_those_that_lose_it(
    tmp_path: Path, end: Callable[[], None], reason: str
) -> None:
    store, left, path = torch.distributed.HashStore(), [], tmp_path / "error.json"
    with pytest.raises(SystemExit), JobGuard(store, 0, leave=left.append, error_file=str(path)):
        end()
    assert not left, "exit handlers of the script's are called"
    line = read_error_file(path)
    assert re.fullmatch(f"rank 0 ended: {reason}", line or "")
    assert report(RuntimeError("Connection closed by peer"), rank=1, store=store) == ([1], f"rank 1 stops: {line}\n")


def test_a_store_that_is_gone_does_not_hide_the_failure() -> None:
    class Gone:
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise RuntimeError("Connection reset by peer")

    left, said = report(ZeroDivisionError("why"), store=Gone())
    assert left == [1]
    assert "ZeroDivisionError: why" in said


def test_a_rank_that_was_killed_is_named_by_those_that_lost_it(tmp_path: Path) -> None:
    """Its process is gone, and it has recorded nothing."""
    store, said, left = torch.distributed.HashStore(), io.StringIO(), []
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    publish(store, 1, beat("saves", **WAITS, host=this_host(), pid=gone.pid))  # type: ignore[arg-type]
    file = tmp_path / "error.json"
    guard = JobGuard(
        store,  # type: ignore[arg-type]
        0,
        world_size=2,
        leave=left.append,
        stream=said,
        error_file=str(file),
        pause=_no_pause,
    )
    with pytest.raises(TransferError), guard:
        raise TransferError("send failed")
    assert left == [1]
    assert re.fullmatch(
        r"rank 0 stops: rank 1 \(process \d+ on \S+\) is gone, ended from outside; when last heard of, it saves\n",
        said.getvalue(),
    )
    assert not file.exists(), "rank 1 failed first"
    recorded = who_failed(store)  # type: ignore[arg-type]
    assert recorded is not None
    assert recorded.rank == 1


FAR = {"host": "node1 boot", "pid": 41}


def lost(store: object, folder: Path, *, waits_for: int | None = None, count: Callable[[], object] = lambda: None) -> str:
    """What rank 0 says when it has lost a peer of a job of four ranks, of which 2 and 3 are on another machine.

    Args:
        waits_for: the rank whose message it waited for.
        count: called at each look for the reason.
    """
    said, paused = io.StringIO(), []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        count()

    own = str(folder / "error.json")
    guard = JobGuard(store, 0, world_size=4, leave=lambda code: None, stream=said, pause=pause, error_file=own)  # type: ignore[arg-type]
    doing = Doing(text="waits", is_first=False, waits_for=waits_for)
    guard.doing = lambda: doing
    with pytest.raises(TransferError), guard:
        raise TransferError("send failed")
    assert max(paused, default=0.0) < 1.0, "no rank of another machine is given time to exit first"
    line = said.getvalue()
    if " stops " in line:
        assert line.endswith(f": {read_error_file(folder / 'error.json')}\n"), "torchrun's summary names it here, too"
    return line


@pytest.mark.parametrize(("waits_for", "named", "other"), [(None, 2, 3), (3, 3, 2)])
def test_a_rank_of_another_machine_whose_heartbeats_end_is_named(
    waits_for: int | None, named: int, other: int, tmp_path: Path
) -> None:
    """Rank 1, on that machine too, has ended its work."""
    store = torch.distributed.HashStore()
    for rank in (1, 2, 3):
        publish(store, rank, beat("runs 2F0", **FAR, is_last=rank == 1))  # type: ignore[arg-type]
    assert lost(store, tmp_path, waits_for=waits_for) == (
        f"rank 0 stops while it waits: rank {named} (process 41 on node1) is gone with rank {other}, ended from outside; when "
        "last heard of, it runs 2F0\n"
    )


def test_a_rank_of_another_machine_that_goes_on_is_not_named(tmp_path: Path) -> None:
    store, beats = torch.distributed.HashStore(), itertools.count()

    def goes_on() -> None:
        publish(store, 2, beat(**FAR, number=next(beats)))  # type: ignore[arg-type]

    goes_on()
    assert lost(store, tmp_path, count=goes_on).startswith("rank 0 failed while it waits:\nTraceback")


def test_a_reason_from_another_machine_is_shown_once_on_each(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    first_to_fail(store, RankFailure(2, "no such dataset (rank 2 on node1 has ended)", "node1 boot"))  # type: ignore[arg-type]
    assert lost(store, tmp_path) == "rank 0 stops while it waits: no such dataset (rank 2 on node1 has ended)\n"
    assert report(ConfigError("no such dataset"), rank=1, store=store) == (
        [2],
        "rank 1 stops: no such dataset (rank 2 on node1 has ended)\n",
    )
    assert report(ConfigError("no such dataset"), rank=0, store=store) == ([2], "")


def test_a_lost_store_is_named_with_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not answer, as when the machine that hosts it has lost its power."""

    class Silent:
        def check(self, keys: list[str]) -> bool:
            time.sleep(1000.0)
            return False

    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(failure, "_STORE_S", 0.2)
    assert lost(Silent(), tmp_path) == (
        "rank 0 stops while it waits: the job's store on node0, port 29500 (MASTER_ADDR, MASTER_PORT), is gone: that host, or "
        "what it ran of this job, has ended\n"
    )


def test_success_and_interrupts_pass() -> None:
    left: list[int] = []
    with JobGuard(torch.distributed.HashStore(), 0, leave=left.append):  # type: ignore[attr-defined]
        pass
    with pytest.raises(KeyboardInterrupt), JobGuard(torch.distributed.HashStore(), 0, leave=left.append):  # type: ignore[attr-defined]
        raise KeyboardInterrupt
    assert left == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_leaves_at_once_leaves_nothing_running() -> None:
    code = (
        "import subprocess, sys\n"
        "from megatron.zerobubble.job.exit import leave_now\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print(child.pid, flush=True)\n"
        "leave_now(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    until = time.monotonic() + 30.0
    while (state := process_state(int(done.stdout))) is not None and not state.is_zombie:
        assert time.monotonic() < until, "it was sent SIGKILL"
        time.sleep(0.01)
