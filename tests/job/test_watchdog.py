"""A stuck pipeline ends, after every rank has logged what it waits for; a slow one continues."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zerobubble.job import watchdog
from megatron.zerobubble.job.error_file import read_error_file
from megatron.zerobubble.job.failure import RankFailure
from megatron.zerobubble.job.heartbeats import Beat, is_gone, own_start, publish, published, this_host
from megatron.zerobubble.job.launch import read_launch
from megatron.zerobubble.job.watchdog import Watchdog, culprit
from megatron.zerobubble.machine import process_state
from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.runtime.watch import Watch

CPU = torch.device("cpu")
GRADIENT = Message(Payload.GRADIENT, 0, 2, 1, 0)


WAITS = {"is_waiting": True}


def beat(doing: str | None = "runs 1F0", **changes: Any) -> Beat:
    """A heartbeat of process 41 on a machine "node"."""
    values: dict[str, Any] = {
        "number": 7,
        "host": "node boot",
        "pid": 41,
        "start": "1",
        "interval_s": 1.0,
        "doing": doing,
        "place": " (in step, loop.py:3)",
        "still_s": 9.0,
        "is_waiting": False,
        "waits_for": None,
    }
    return Beat(**values | changes)


class Rank:
    """A watchdog, its watch that a test drives, and what it did."""

    def __init__(
        self,
        store: torch.distributed.Store,
        rank: int,
        *,
        world_size: int = 1,
        limit_s: float = 0.4,
        first_limit_s: float = 60.0,
        error_file: str | None = None,
    ) -> None:
        self.watch = Watch(CPU)
        self.left = threading.Event()
        self.dog = Watchdog(
            self.watch,
            store,  # type: ignore[arg-type]
            replace(read_launch({}), rank=rank, world_size=world_size, error_file=error_file),
            limit_s=limit_s,
            timeout_s=first_limit_s / 0.9,
            leave=self._leave,
        )

    def _leave(self, code: int) -> None:
        assert code == 1
        self.left.set()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks leave when all have logged what they do."""
    monkeypatch.setattr(watchdog, "_GRACE_S", 1.0)
    monkeypatch.setattr(watchdog, "_AFTERWARDS_S", 0.0)
    monkeypatch.setattr(watchdog, "_LEAST_LOOK_S", 0.5)


@pytest.fixture
def store() -> torch.distributed.Store:
    return torch.distributed.HashStore()


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("megatron.zerobubble.job")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def first_iteration(watch: Watch) -> None:
    for forward_only in (False, True):
        with watch.passes(forward_only=forward_only):
            pass


def test_every_rank_logs_what_it_waits_for(store: torch.distributed.Store, said: io.StringIO) -> None:
    """Rank 1 is stuck in a forward pass, rank 0 waits for it, rank 2 is outside of the passes."""
    ranks = [Rank(store, rank, world_size=3) for rank in range(3)]
    for rank in ranks:
        first_iteration(rank.watch)
    with ranks[0].dog, ranks[1].dog, ranks[2].dog, ranks[0].watch.passes(forward_only=False):
        ranks[0].watch.awaited(GRADIENT)
        with ranks[1].watch.passes(forward_only=False):
            ranks[1].watch.start(Op.parse("1F2"))
            for rank in ranks:
                assert rank.left.wait(10.0)
    first, *lines = said.getvalue().splitlines()
    assert first.startswith("stuck: rank 1 makes no progress: it runs 1F2, the forward of stage 1, microbatch 2, for 0.")
    assert len(lines) == 3
    lines = sorted(lines)
    assert lines[0].startswith(
        "stuck: rank 0 waits, before 0B2, to receive the gradient for stage 0, microbatch 2 (rank 1 to rank 0)"
    )
    assert lines[1].startswith("stuck: rank 1 runs 1F2, the forward of stage 1, microbatch 2, for 0.")
    assert lines[2].startswith("stuck: rank 2 is outside of the passes")
    assert "test_watchdog.py" in lines[1] or "threading.py" in lines[1], "and where the main thread is"


def test_a_beat_at_once_says_what_the_rank_does_now(store: torch.distributed.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that is stopped as a call begins would be taken for one between two calls, which is patiently waited for."""
    monkeypatch.setattr(watchdog, "_LONGEST_INTERVAL_S", 1000.0)
    rank = Rank(store, 0, limit_s=20_000.0)

    def says(doing: str | None) -> bool:
        beat = published(store, [0]).get(0)  # type: ignore[arg-type]
        return beat is not None and beat.doing == doing

    with rank.dog:
        _until(lambda: says(None))
        with rank.watch.phase("is in a call"):
            rank.dog.beat_now()
            _until(lambda: says("is in a call"))


def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_wait_for_a_rank_outside_of_the_passes_is_no_alarm(store: torch.distributed.Store, said: io.StringIO) -> None:
    """Rank 1 is in a loop that is not ours, rank 2 in a phase. Both take as long as it takes, and rank 0 waits for them."""
    ranks = [Rank(store, rank, world_size=3, limit_s=2.0) for rank in range(3)]  # a busy machine may delay beats by a second
    for rank in ranks:
        first_iteration(rank.watch)
    with ranks[0].dog, ranks[1].dog, ranks[2].dog, ranks[2].watch.phase("saves"), ranks[0].watch.passes(forward_only=False):
        ranks[0].watch.awaited(GRADIENT)
        assert not ranks[0].left.wait(3.0)
        ranks[1].dog._exchange = lambda beat, passed_s: None  # type: ignore[method-assign]
        # stands for one that computes in C++ and does not let its other threads run
        assert not ranks[0].left.wait(3.0)
    assert said.getvalue() == ""


def test_progress_idle_time_and_a_first_iteration_are_no_alarm(store: torch.distributed.Store, said: io.StringIO) -> None:
    rank = Rank(store, 0, limit_s=0.2)
    with rank.dog:
        for forward_only in (False, True):
            with rank.watch.passes(forward_only=forward_only):
                rank.watch.start(Op.parse("0F0"))
                time.sleep(0.5)  # compiles
        time.sleep(0.5)  # saves, plans
        with rank.watch.passes(forward_only=False):
            for _ in range(30):
                rank.watch.start(Op.parse("0F0"))  # the same op in another iteration is progress
                time.sleep(0.02)
    assert not rank.left.is_set()
    assert said.getvalue() == ""


def test_a_rank_that_falls_silent_is_named_in_any_phase(
    store: torch.distributed.Store, said: io.StringIO, tmp_path: Path
) -> None:
    """Rank 1 stands for a stopped process: its thread ends without a last heartbeat."""
    files = [tmp_path / str(rank) / "error.json" for rank in range(3)]
    ranks = [Rank(store, rank, world_size=3, error_file=str(file)) for rank, file in enumerate(files)]
    with ExitStack() as stack:
        for entered in (ranks[0].dog, ranks[2].dog, *(rank.watch.phase("saves") for rank in ranks)):
            stack.enter_context(entered)
        publish(store, 1, ranks[1].dog._next_beat(0.0))  # type: ignore[arg-type]
        for each in (ranks[0], ranks[2]):
            assert each.left.wait(20.0)
    first, *lines = said.getvalue().splitlines()
    assert re.match(r"stuck: rank 1 \(process \d+ on \S+\) is silent: it is stopped, .* heard of, it saves \(", first)
    assert sorted(line.partition(", for")[0] for line in lines) == ["stuck: rank 0 saves", "stuck: rank 2 saves"]
    for file in (files[0], files[2]):
        reason = read_error_file(file)
        assert reason is not None
        assert reason.startswith("rank 1 (process"), "torchrun shows it for whatever rank it takes for the first"


def test_a_rank_that_never_calls_is_named(store: torch.distributed.Store, said: io.StringIO) -> None:
    rank = Rank(store, 0, world_size=2, first_limit_s=1.0)
    with rank.dog, rank.watch.phase("is in a call"):
        assert rank.left.wait(20.0)
    assert said.getvalue().startswith("stuck: rank 1 has not called the schedule (")


def test_a_rank_leaves_with_the_reason_of_another_one_that_it_has_not_noticed(
    store: torch.distributed.Store, said: io.StringIO, tmp_path: Path
) -> None:
    """Which failed on another machine, whose torchrun ends no rank here."""
    rank = Rank(store, 0, world_size=2, error_file=str(tmp_path / "error.json"))
    with rank.dog, rank.watch.phase("waits"):
        watchdog.first_to_fail(store, RankFailure(1, "rank 1 failed: OSError", "node1 boot"))  # type: ignore[arg-type]
        assert rank.left.wait(20.0)
    assert said.getvalue() == "rank 0 stops: rank 1 failed: OSError\n"
    assert read_error_file(tmp_path / "error.json") == "rank 1 failed: OSError"


def test_a_rank_that_has_ended_is_not_missed(store: torch.distributed.Store, said: io.StringIO) -> None:
    first, second = (Rank(store, rank, world_size=2, limit_s=1.0) for rank in range(2))
    with first.dog, first.watch.phase("writes the summary"):
        with second.dog:
            pass
        assert not first.left.wait(2.0)
    assert said.getvalue() == ""


def test_a_store_that_does_not_answer_ends_the_rank(said: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LEAST_UNANSWERED_S", 0.5)

    class Stopped(torch.distributed.HashStore):  # type: ignore[misc]
        """Stands for a store whose process is stopped: no call returns."""

        def clone(self) -> Stopped:
            return self

        def set(self, key: str, value: str) -> None:
            time.sleep(10_000)

    rank = Rank(Stopped(), 3, world_size=4)
    with suppress(ZeroDivisionError), rank.dog, rank.watch.phase("saves"):
        assert rank.left.wait(20.0)
        raise ZeroDivisionError  # leave without waiting for the thread
    assert said.getvalue().startswith("stuck: the job's store does not answer rank 3: ")


def test_ranks_that_all_wait_have_lost_a_message(store: torch.distributed.Store, said: io.StringIO) -> None:
    """In a first iteration, too, whose limit is longer: nobody is at work."""
    ranks = [Rank(store, rank, world_size=2) for rank in range(2)]
    passes = [rank.watch.passes(forward_only=False) for rank in ranks]
    with ranks[0].dog, ranks[1].dog, passes[0], passes[1]:
        ranks[0].watch.awaited(GRADIENT)
        ranks[1].watch.awaited(Message(Payload.ACTIVATION, 1, 3, 0, 1))
        for rank in ranks:
            assert rank.left.wait(20.0)
    assert said.getvalue().startswith(
        "stuck: ranks 0 and 1 wait for each other, so a message between them is lost: rank 0 waits,"
    )


def fail_after(report: Callable[[Message], None]) -> None:
    report(GRADIENT)
    raise ZeroDivisionError


def test_an_error_is_reported_with_the_activity() -> None:
    watch = Watch(CPU)
    with pytest.raises(ZeroDivisionError), watch.passes(forward_only=False):
        fail_after(watch.awaited)
    assert str(watch.last().text).startswith("waits, before 0B2, to receive the gradient")
    with watch.doing("steps"):
        pass
    assert watch.last() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_the_device_that_is_stuck() -> None:
    """The host has issued everything and is idle; the device is still in the second op."""
    watch = Watch(torch.device("cuda"), apart_s=0.0)
    with watch.passes(forward_only=False):
        watch.start(Op.parse("0F0"))
        watch.start(Op.parse("0F1"))
        torch.cuda._sleep(2_000_000_000)
        watch.start(Op.parse("0B0"))
    doing = watch.current()
    assert doing is not None
    assert doing.text.startswith("runs 0F1")
    torch.cuda.synchronize()
    assert watch.current() is None


# -- which rank is named ----------------------------------------------------------------------------------------------------


def named(beats: dict[int, Beat], *silent: int, world_size: int | None = None) -> tuple[int, str]:
    found = culprit(beats, silent, world_size=len(beats) if world_size is None else world_size, least_still_s=5.0)
    assert found.is_hang
    return found.rank, found.line


def test_a_silent_rank_is_named_with_what_it_did_last() -> None:
    """Even if others are at the same activity for longer: they may wait in it."""
    assert named({0: beat(still_s=20.0), 1: beat(**WAITS), 2: beat("saves"), 3: beat()}, 2, 3) == (
        2,
        "rank 2 (process 41 on node) is silent: it is stopped, or its machine is gone; when last heard of, it saves (in step, "
        "loop.py:3); the same is true of rank 3",
    )


def test_ranks_that_never_called_are_named() -> None:
    also = "; the same is true of ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert named({0: beat(**WAITS)}, world_size=12) == (1, f"rank 1 has not called the schedule{also}")


def test_a_rank_that_works_is_named_before_those_that_wait_longer_for_it() -> None:
    beats = {0: beat("waits", still_s=30.0, waits_for=1, **WAITS), 1: beat(), 2: beat(still_s=1.0), 3: beat(None, still_s=90.0)}
    assert named(beats) == (1, "rank 1 makes no progress: it runs 1F0, for 9.0 s (in step, loop.py:3)")


def test_ranks_that_may_wait_for_each_other_in_an_op_are_all_shown() -> None:
    rank, line = named({0: beat("runs 0F0"), 1: beat("runs 0F0", still_s=10.0)})
    assert (rank, line.count("runs 0F0, for")) == (1, 2)


def test_two_that_wait_for_each_other_have_lost_a_message() -> None:
    peers = {0: 1, 1: 2, 2: 1, 3: 2}
    rank, line = named({rank: beat(f"waits for {peer}", waits_for=peer, **WAITS) for rank, peer in peers.items()})
    assert rank == 1
    assert line.startswith("ranks 1 and 2 wait for each other, so a message between them is lost: rank 1 waits for 2, for 9")


def test_all_wait_and_nothing_else_is_known() -> None:
    rank, line = named({rank: beat("saves", still_s=9.0 + rank % 2, **WAITS) for rank in range(4)})
    assert (rank, line.startswith("every rank waits for others, first rank 1: it saves, for 10.0 s")) == (1, True)


def test_heartbeats_come_back_as_they_were_published(store: torch.distributed.Store) -> None:
    said = {0: beat(waits_for=1), 2: beat(None)}
    for rank, each in said.items():
        publish(store, rank, each)  # type: ignore[arg-type]
    assert published(store, range(4)) == said  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_is_gone_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as other:
        state = process_state(other.pid)
        assert state is not None
        theirs = beat(host=this_host(), pid=other.pid, start=state.start)
        assert not is_gone(theirs)
        assert not is_gone(beat(pid=os.getpid(), start=own_start()))
        assert is_gone(theirs._replace(start="1")), "another process that has its number"
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # still a zombie, as for a moment under torchrun
        assert is_gone(theirs)
        other.wait()
        assert is_gone(theirs)
