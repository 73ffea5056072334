"""Leaving early: one iteration for all ranks, agreed on without a barrier."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from megatron.zerobubble.training.resilience.early_exit import EarlyExit


@pytest.fixture
def store() -> torch.distributed.HashStore:
    return torch.distributed.HashStore()


@pytest.fixture
def signalled(store: torch.distributed.HashStore) -> Iterator[EarlyExit]:
    early_exit = EarlyExit(store, handles_signal=True, after_minutes=None)  # type: ignore[arg-type]
    yield early_exit
    early_exit.close()


def test_nobody_asks() -> None:
    class Untouchable:
        """A store that must not be asked: asking costs a round trip an iteration."""

    early_exit = EarlyExit(Untouchable(), handles_signal=False, after_minutes=None)  # type: ignore[arg-type]
    assert not early_exit.is_due(1)


def test_all_leave_one_iteration_after_the_first_who_knew(store: torch.distributed.HashStore, signalled: EarlyExit) -> None:
    other = EarlyExit(store, handles_signal=False, after_minutes=60.0)  # type: ignore[arg-type]
    assert not signalled.is_due(4)
    assert not other.is_due(4)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not signalled.is_due(5), "the other rank may be past its own look at iteration 5"
    assert not signalled.is_urgent
    assert not other.is_due(5)
    assert other.is_due(6)
    assert signalled.is_due(6)
    assert (signalled.is_urgent, other.is_urgent) == (True, True)


def test_the_first_to_ask_decides(store: torch.distributed.HashStore, signalled: EarlyExit) -> None:
    late = EarlyExit(store, handles_signal=False, after_minutes=0.0)  # type: ignore[arg-type]
    assert not late.is_due(7)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signalled.is_due(8)
    assert late.is_due(8)
    assert not late.is_urgent, "time was up before the signal came"


def test_afterwards_the_signal_does_what_it_did(store: torch.distributed.HashStore) -> None:
    before = signal.getsignal(signal.SIGTERM)
    early_exit = EarlyExit(store, handles_signal=True, after_minutes=None)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) != before
    early_exit.close()
    assert signal.getsignal(signal.SIGTERM) == before
