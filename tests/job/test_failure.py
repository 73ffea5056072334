"""A rank that fails ends the job: at once, with its own traceback on top."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.zerobubble.errors import ConfigError, TransferError
from megatron.zerobubble.job.error_file import read_error_file
from megatron.zerobubble.job.failure import JobGuard, who_failed
from megatron.zerobubble.job.heartbeats import publish, this_process
from tests.job.test_verdict import WAITS, beat
from tests.training.launch import TINY_BATCH, TINY_MODEL, launch

FAILING_SCRIPT = """
import pretrain_gpt
provide = pretrain_gpt.forward_step_provider

def failing_provider(setup):
    forward_step, calls = provide(setup), [0]
    def step(data_iterator, chunk):
        import torch
        calls[0] += 1
        if torch.distributed.get_rank() == 1 and calls[0] == 10:  # in the middle of iteration 3, with two chunks 2
            import pathlib, time
            pathlib.Path(__file__).with_suffix(".when").write_text(str(time.time()))
            raise ZeroDivisionError("the injected failure")
        return forward_step(data_iterator, chunk)
    return step

pretrain_gpt.run(pretrain_gpt.model_provider, failing_provider)
"""


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
    process = replace(this_process(), pid=gone.pid, born="1")
    gone.wait()
    publish(store, 1, replace(beat("saves", **WAITS), process=process))  # type: ignore[arg-type]
    files = [tmp_path / str(rank) / "error.json" for rank in range(2)]
    for file in files:
        file.parent.mkdir()
    guard = JobGuard(
        store,  # type: ignore[arg-type]
        0,
        world_size=2,
        leave=left.append,
        stream=said,
        error_file=str(files[0]),
        pause=_no_pause,
    )
    with pytest.raises(TransferError), guard:
        raise TransferError("send failed")
    assert left == [1]
    assert re.fullmatch(
        r"rank 0 stops: rank 1 \(process \d+ on \S+\) is gone, ended from outside; when last heard of, it saves\n",
        said.getvalue(),
    )
    assert str(read_error_file(files[1])).startswith("rank 1 (process")
    failure = who_failed(store)  # type: ignore[arg-type]
    assert failure is not None
    assert failure.rank == 1


def test_success_and_interrupts_pass() -> None:
    left: list[int] = []
    with JobGuard(torch.distributed.HashStore(), 0, leave=left.append):  # type: ignore[attr-defined]
        pass
    with pytest.raises(KeyboardInterrupt), JobGuard(torch.distributed.HashStore(), 0, leave=left.append):  # type: ignore[attr-defined]
        raise KeyboardInterrupt
    assert left == []


@pytest.mark.parametrize("schedule", ["", "--zero-bubble-v-schedule"], ids=["stock", "zbv"])
@pytest.mark.sampled(0.25, group="whole jobs")
def test_a_rank_that_raises_ends_the_job(schedule: str, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING_SCRIPT)
    flags = f"--pipeline-model-parallel-size 2 --mock-data --eval-iters 0 --train-iters 1000 {schedule}"
    done = launch([*TINY_MODEL, *TINY_BATCH, *flags.split()], num_ranks=2, script=script)
    ended = time.time()
    assert done.returncode != 0
    assert "iteration        1/    1000" in done.stdout, "it failed in the middle"
    said = done.stderr
    where = r" while it runs \dF\d, the forward of stage \d, microbatch \d"
    where = where if schedule else " while it runs the passes of megatron-core's own schedule"
    assert re.search(rf"^rank 1 failed{where}:\nTraceback", said, re.MULTILINE)
    assert "ZeroDivisionError: the injected failure" in said
    assert said.index("ZeroDivisionError") < said.index("ChildFailedError"), "torchrun's summary comes after it"
    assert "rank 0 failed" not in said
    assert ended - float(script.with_suffix(".when").read_text()) < 30.0
