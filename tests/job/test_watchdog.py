"""A stuck pipeline ends, after every rank has logged what it waits for; a slow one continues."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.zerobubble.job import watchdog
from megatron.zerobubble.job.error_file import read_error_file
from megatron.zerobubble.job.heartbeats import published
from megatron.zerobubble.job.launch import read_launch
from megatron.zerobubble.job.watchdog import Watchdog
from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.runtime.watch import Watch
from tests.training.launch import TINY_BATCH, TINY_MODEL, launch_warm

CPU = torch.device("cpu")
GRADIENT = Message(Payload.GRADIENT, 0, 2, 1, 0)


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
    """Ranks that are not named leave at once, too."""
    monkeypatch.setattr(watchdog, "_AFTERWARDS_S", 0.0)


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


def test_a_rank_that_cannot_report_is_not_waited_for(
    store: torch.distributed.Store, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.2)
    rank = Rank(store, 0, world_size=2)
    first_iteration(rank.watch)
    with rank.dog, rank.watch.passes(forward_only=False):
        rank.watch.start(Op.parse("0F2"))
        assert rank.left.wait(10.0)
    assert "stuck: rank 0 runs 0F2, the forward of stage 0, microbatch 2" in said.getvalue()


def test_a_wait_for_a_rank_outside_of_the_passes_is_no_alarm(store: torch.distributed.Store, said: io.StringIO) -> None:
    """Rank 1 is in a loop that is not ours, rank 2 in a phase. Both take as long as it takes, and rank 0 waits for them."""
    ranks = [Rank(store, rank, world_size=3, limit_s=2.0) for rank in range(3)]  # a busy machine may delay beats by a second
    for rank in ranks:
        first_iteration(rank.watch)
    with ranks[0].dog, ranks[1].dog, ranks[2].dog, ranks[2].watch.phase("saves"), ranks[0].watch.passes(forward_only=False):
        ranks[0].watch.awaited(GRADIENT)
        assert not ranks[0].left.wait(3.0)
        ranks[1].dog._over.set()  # stands for one that computes in C++ and does not let its other threads run
        ranks[1].dog._pulse._publish = lambda *, is_last: None  # type: ignore[method-assign]
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
    store: torch.distributed.Store, said: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 stands for a stopped process: its threads end without a last beat."""
    killed: list[int] = []
    monkeypatch.setattr(watchdog, "kill_if_stopped", killed.append)
    files = [tmp_path / str(rank) / "error.json" for rank in range(3)]
    for file in files:
        file.parent.mkdir()
    ranks = [Rank(store, rank, world_size=3, error_file=str(file)) for rank, file in enumerate(files)]
    with ExitStack() as stack:
        for entered in (ranks[0].dog, ranks[2].dog, *(rank.watch.phase("saves") for rank in ranks)):
            stack.enter_context(entered)
        ranks[1].dog._stillness.look(1.0)
        ranks[1].dog._pulse._publish(is_last=False)
        for each in (ranks[0], ranks[2]):
            assert each.left.wait(20.0)
    first, *lines = said.getvalue().splitlines()
    assert re.match(r"stuck: rank 1 \(process \d+ on \S+\) has said nothing for \d+\.\d s: .* heard of, it saves \(", first)
    assert sorted(line.partition(", for")[0] for line in lines) == ["stuck: rank 0 saves", "stuck: rank 2 saves"]
    assert set(killed) == {1}
    for file in files:
        reason = read_error_file(file)
        assert reason is not None
        assert reason.startswith("rank 1 (process"), "torchrun shows it for whatever rank it takes for the first"


def test_a_rank_that_never_joins_is_named(store: torch.distributed.Store, said: io.StringIO) -> None:
    rank = Rank(store, 0, world_size=2, first_limit_s=1.0)
    with rank.dog, rank.watch.phase("joins the job"):
        assert rank.left.wait(20.0)
    assert said.getvalue().startswith("stuck: rank 1 has not joined the job: it has said nothing for ")


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
        raise ZeroDivisionError  # leave without waiting for the thread that is in the store
    assert said.getvalue().startswith("stuck: the job's store has not answered rank 3 for ")


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


STUCK_SCRIPT = """
from tests.training import reference_trainer
provide = reference_trainer.forward_step_provider

def stuck_provider(setup):
    forward_step, calls = provide(setup), [0]
    def step(data_iterator, chunk):
        import pathlib, time, torch
        calls[0] += 1
        if torch.distributed.get_rank() == 1 and calls[0] == 16:  # in iteration 3, before which there was an evaluation
            pathlib.Path(__file__).with_suffix(".when").write_text(str(time.time()))
            time.sleep(10_000)
        return forward_step(data_iterator, chunk)
    return step

if __name__ == "__main__":
    reference_trainer.run(reference_trainer.model_provider, stuck_provider)
"""
STUCK = [*TINY_MODEL, *TINY_BATCH, "--mock-data", "--pipeline-model-parallel-size", "2", "--enable-zero-bubble"]
STUCK += ["--train-iters", "1000", "--eval-iters", "1", "--eval-interval", "2", "--save-interval", "2"]
STUCK += ["--zero-bubble-watchdog-seconds", "3"]


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_job_in_which_a_rank_sleeps_ends_with_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK_SCRIPT)
    done = launch_warm([*STUCK, "--save", str(tmp_path / "saved")], num_ranks=2, script=script)
    took_s = time.time() - float(script.with_suffix(".when").read_text())
    assert done.returncode != 0
    assert "saved " in done.stdout
    assert "validation loss at iteration 2" in done.stdout
    assert re.search(r"stuck: rank 1 runs 1F\d, the forward of stage 1, .* \(in step, stuck.py:\d+\)", done.stdout), done.stdout
    assert re.search(r"stuck: rank 0 waits, before 0B\d, to receive the gradient for stage 0, microbatch \d", done.stdout)
    assert took_s < 30.0, "a few seconds on a machine that does nothing else"
