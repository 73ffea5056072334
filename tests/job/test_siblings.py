"""Ranks of this machine are found in its process table: no entry of the store kills a process or overwrites a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megatron.zerobubble.job import watchdog
from megatron.zerobubble.job.error_file import read_error_file, write_error_file
from megatron.zerobubble.job.heartbeats import publish, published, this_process
from megatron.zerobubble.job.siblings import error_file_beside, write_beside
from megatron.zerobubble.machine import process_state
from tests.job.test_failure import report
from tests.job.test_verdict import beat
from tests.job.test_watchdog import Rank

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.claims("Long runs", "what others write into the job's store kills no process and overwrites no file", "works"),
]

LAUNCHER = """
import os, signal, subprocess, sys
def start(rank, code, **changes):
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_PORT": "1", **changes}
    return subprocess.Popen([sys.executable, "-c", code], env=environment)
sleepers = [start(1, SLEEP), start(1, SLEEP, MASTER_PORT="2"), start(2, SLEEP), start(1, SLEEP)]
for each in sleepers[:3]:
    os.kill(each.pid, signal.SIGSTOP)
    os.waitpid(each.pid, os.WUNTRACED)
found = [start(0, f"from megatron.zerobubble.job.siblings import kill_if_stopped as k; exit(k(1))").wait() for _ in range(2)]
print(found, [each.poll() for each in sleepers])
for each in sleepers:
    each.kill()
"""


def test_only_the_stopped_rank_of_the_same_launcher_is_killed() -> None:
    """Not the rank of another job, nor another rank, nor one that runs."""
    code = LAUNCHER.replace("SLEEP", repr("import time; time.sleep(1000)"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[1, 0] [-9, None, None, None]\n"


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


def test_error_files_are_those_of_one_torchrun(tmp_path: Path) -> None:
    for local in range(2):
        (tmp_path / str(local)).mkdir()
    own = str(tmp_path / "1" / "error.json")
    found = {rank: error_file_beside(own, own_rank=5, rank=rank) for rank in (0, 3, 4, 5, 6, -(10**15))}
    assert {rank for rank, file in found.items() if file} == {4, 5}
    write_error_file(own, "own")
    write_beside(own, own_rank=5, rank=4, line="first")
    write_beside(own, own_rank=5, rank=4, line="again, by another rank")
    assert read_error_file(tmp_path / "0" / "error.json") == "first"
    times = [json.loads((tmp_path / each / "error.json").read_text())["message"]["extraInfo"]["timestamp"] for each in "01"]
    assert times[0] < times[1], "torchrun shows the earliest, in whole seconds"
    assert found[4] == str(tmp_path / "0" / "error.json")
    for other in (None, "", str(tmp_path / "error.json"), str(tmp_path / "1" / "other.json")):
        assert error_file_beside(other, own_rank=5, rank=4) is None


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process of this user that is no rank, stopped."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as other:
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        yield other.pid
        assert other.poll() is None, "nobody has killed it"
        other.kill()


def test_forged_entries_kill_nothing_and_overwrite_nothing(stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm that names a process and a file: the rank leaves, and does no more."""
    monkeypatch.setattr(watchdog, "_AFTERWARDS_S", 0.0)
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.2)
    file = tmp_path / "error.json"
    file.write_text("mine")
    store, state = torch.distributed.HashStore(), process_state(stopped)
    assert state is not None
    forged = asdict(beat(process=replace(this_process(), pid=stopped, born=state.start)))
    for process in (forged["process"], forged["process"] | {"error_file": str(file)}):
        store.set("beat/1", json.dumps(forged | {"process": process}))
        store.set("stuck", "1")
        store.set("stuck/verdict", json.dumps({"rank": 1, "reason": "forged", "num_silent": 1}))
        rank = Rank(store, 0, world_size=2, error_file=str(tmp_path / "0.json"))
        with suppress(ZeroDivisionError), rank.dog, rank.watch.phase("saves"):
            assert rank.left.wait(10.0)
            raise ZeroDivisionError
    assert file.read_text() == "mine"


GARBAGE = [
    b"\xff\xfe",
    b"",
    b"[" * 100_000,
    b"1" * 5000,
    b"null",
    b"{}",
    b"[1, 2]",
    b'{"connections": {}, "process": {}}',
    b"cos\nsystem\n(S'touch forged'\ntR.",
]


@pytest.mark.parametrize("value", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_in_the_store_is_one_line_and_ignored(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = torch.distributed.HashStore()
    for key in ("beat/1", "first_failure"):
        store.set(key, value)
    publish(store, 0, beat())  # type: ignore[arg-type]
    assert list(published(store, range(2))) == [0]  # type: ignore[arg-type]
    left, said = report(ConnectionError("reset"), rank=3, store=store)
    assert (left, said.splitlines()[0]) == ([1], "rank 3 failed:")
    for line in caplog.messages:
        assert "what no rank writes" in line
        assert line.isprintable()
        assert len(line) < 200
    assert len(caplog.messages) == 1 + (value != b"")  # HashStore takes an empty value for one that is not set


@pytest.mark.parametrize(
    "change",
    [{"still_s": float("nan")}, {"num_iterations": 10**400}, {"doing": 3}, {"process": {"host": " ", "pid": 1, "born": ""}}],
)
def test_a_beat_of_wrong_types_is_ignored(change: dict[str, object]) -> None:
    store = torch.distributed.HashStore()
    store.set("beat/0", json.dumps(asdict(beat()) | change))
    assert published(store, [0]) == {}  # type: ignore[arg-type]


def test_a_forged_text_cannot_write_to_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    store = torch.distributed.HashStore()
    store.set("first_failure", json.dumps({"rank": 1, "line": "\x1b]0;title\x07" + "a" * 100_000, "host": "node1"}))
    _, said = report(ConnectionError("reset"), rank=3, store=store)
    assert said.startswith("rank 3 stops: '\\x1b]0;title\\x07aaa")
    assert len(said) < 5000
