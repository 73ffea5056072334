"""Early exit: after the same iteration on all ranks, without a barrier."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron.zerobubble.training import loop
from megatron.zerobubble.training.early_exit import EarlyExit

pytestmark = pytest.mark.claims(
    "Long runs",
    "early exit on SIGTERM, at a time limit, at an iteration; a rank that raises ends the job",
    "works",
    also=("job/test_failure.py",),
)


@pytest.fixture
def store() -> torch.distributed.HashStore:
    return torch.distributed.HashStore()


@pytest.fixture
def signalled(store: torch.distributed.HashStore) -> Iterator[EarlyExit]:
    early_exit = EarlyExit(store, handles_signal=True, after_minutes=None)  # type: ignore[arg-type]
    yield early_exit
    early_exit.close()


def test_without_a_signal_or_limit_the_store_is_not_read() -> None:
    class Untouchable:
        """A store that must not be read: that costs a round trip per iteration."""

    early_exit = EarlyExit(Untouchable(), handles_signal=False, after_minutes=None)  # type: ignore[arg-type]
    assert not early_exit.is_due(1)


def test_all_ranks_exit_one_iteration_after_the_first_signal(store: torch.distributed.HashStore, signalled: EarlyExit) -> None:
    other = EarlyExit(store, handles_signal=False, after_minutes=60.0)  # type: ignore[arg-type]
    assert not signalled.is_due(4)
    assert not other.is_due(4)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not signalled.is_due(5), "the other rank may already have read the store in iteration 5"
    assert not signalled.is_urgent
    assert not other.is_due(5)
    assert other.is_due(6)
    assert signalled.is_due(6)
    assert (signalled.is_urgent, other.is_urgent) == (True, True)


def test_an_iteration_that_no_rank_has_written_ends_nothing(
    store: torch.distributed.HashStore, signalled: EarlyExit, caplog: pytest.LogCaptureFixture
) -> None:
    store.set("early_exit", "1 signal\n\xff")
    assert not signalled.is_due(4)
    assert not signalled.is_due(5)
    (line,) = caplog.messages
    assert line.startswith("early exit is off: the job's store has, as its iteration, what no rank writes: ")


def test_the_first_reason_counts(store: torch.distributed.HashStore, signalled: EarlyExit) -> None:
    late = EarlyExit(store, handles_signal=False, after_minutes=0.0)  # type: ignore[arg-type]
    assert not late.is_due(7)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signalled.is_due(8)
    assert late.is_due(8)
    assert not late.is_urgent, "time was up before the signal came"


def test_closing_restores_the_signal_handler(store: torch.distributed.HashStore) -> None:
    before = signal.getsignal(signal.SIGTERM)
    early_exit = EarlyExit(store, handles_signal=True, after_minutes=None)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) != before
    early_exit.close()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("left", [0, 1])
def test_an_exit_is_logged_only_if_iterations_are_left(
    store: torch.distributed.HashStore, signalled: EarlyExit, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Scripts start the job again when they find the line. After the last iteration only the final evaluation is left out."""
    os.kill(os.getpid(), signal.SIGTERM)
    run = object.__new__(loop._Run)
    run.early_exit = signalled
    run.settings = SimpleNamespace(run=SimpleNamespace(exit_interval=None), train_iters=6)  # type: ignore[assignment]
    exits = []
    with caplog.at_level(logging.INFO):
        for iteration in range(5 - left, 7 - left):
            run.progress = loop.TrainingProgress(iteration, 0)
            exits.append(run._exits_early())
    assert exits == [False, True]
    assert signalled.is_urgent
    assert re.findall(r"exiting at iteration \d+ \(on SIGTERM\)", caplog.text) == ["exiting at iteration 5 (on SIGTERM)"] * left
