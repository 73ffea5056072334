"""Whether a rank waits for others, by where its main thread is."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zerobubble.runtime.issuer import Issued
from megatron.zerobubble.training.resilience import pulse
from megatron.zerobubble.wgrad.sharing import Gathered

OURS = [end for end in pulse._WAITING if end.startswith("megatron/zerobubble/")]


def _issued(work: Any) -> Issued:
    issued = Issued(lambda: work)
    issued.make()
    return issued


def _gathered(work: Any) -> Gathered:
    gathered = object.__new__(Gathered)
    gathered._work, gathered._full = work, None  # type: ignore[assignment]
    return gathered


@pytest.mark.parametrize("waiting", [_issued, _gathered])
def test_a_thread_in_a_wait_of_ours_waits_for_another_rank(waiting: Any) -> None:
    """A work of torch waits in C, as the lock does that stands for it here, so the frame is the function that calls it."""
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=waiting(SimpleNamespace(wait=lock.acquire)).wait)
    thread.start()
    frame = None
    while frame is None or not pulse._is_waiting(None, frame):
        assert thread.is_alive()
        time.sleep(0.01)
        frame = sys._current_frames().get(thread.ident or 0)
    lock.release()
    thread.join()
    assert not pulse._is_waiting(None, sys._getframe())


@pytest.mark.parametrize("end", OURS)
def test_every_file_that_waits_exists(end: str) -> None:
    path = Path(pulse.__file__).parents[4] / end
    assert "wait()" in path.read_text()
