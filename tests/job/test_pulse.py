"""Whether a rank waits for others, by where its main thread is."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zerobubble.job import pulse
from megatron.zerobubble.runtime.issuer import Issued
from megatron.zerobubble.runtime.staging import Receiving
from megatron.zerobubble.wgrad.sharing import Gathered

PACKAGE = Path(pulse.__file__).parents[2]
BY_OTHERS = {
    *("cli/ranks.py", "playground/pool.py"),  # for processes, which are no ranks of a job
    *("runtime/clock.py", "runtime/executor.py", "runtime/recording.py", "wgrad/grouping.py", "wgrad/store.py"),
}
"""Files that call a wait of another file of the package, whose frame is then the innermost one, or that wait for no rank."""


def _issued(work: Any) -> Issued:
    issued = Issued(lambda: work)
    issued.make()
    return issued


def _gathered(work: Any) -> Gathered:
    gathered = object.__new__(Gathered)
    gathered._work, gathered._full = work, None  # type: ignore[assignment]
    return gathered


def _staged(work: Any) -> Receiving:
    """One whose message the thread of the arrivals waits for, too."""
    receiving = object.__new__(Receiving)
    receiving._is_claimed, receiving._is_here, receiving._error = threading.Lock(), threading.Event(), None
    receiving._copies = SimpleNamespace(follow=lambda copied: None)  # type: ignore[assignment]
    receiving._copied = None
    receiving._is_claimed.acquire()
    threading.Thread(target=lambda: (work.wait(), receiving._is_here.set()), daemon=True).start()
    return receiving


@pytest.mark.parametrize("waiting", [_issued, _gathered, _staged])
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


def test_every_file_that_waits_is_known() -> None:
    waiting = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if ".wait()" in path.read_text()}
    known = {end.partition("megatron/zerobubble/")[2] for end in pulse._WAITING} - {""}
    assert waiting - BY_OTHERS == known
