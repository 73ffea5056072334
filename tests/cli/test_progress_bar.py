"""Progress on a terminal, which is a pair of pseudo-terminals here, and silence elsewhere."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron.zerobubble.cli import progress_bar as progress
from megatron.zerobubble.cli.main import main
from tests.training.launch import ROOT

SCRIPT = """
import sys, time, tqdm
from concurrent.futures import ThreadPoolExecutor
from megatron.zerobubble.cli import progress_bar as progress
progress.PATIENCE_S = float(sys.argv[1])
progress._REFRESH_S = 0.02
with ThreadPoolExecutor(1) as pool:
    progress.waited(pool.submit(time.sleep, 0.2), lambda: "searching")
for _ in progress.track(range(3), "limits"):
    time.sleep(0.05)
print("done")
"""


def on_a_terminal(patience_s: float) -> tuple[str, str]:
    """Standard output, and what the terminal shows of standard error."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(patience_s)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    shown = b""
    os.set_blocking(ours, False)
    with contextlib.suppress(BlockingIOError):  # all is read; while `theirs` is open, which would discard the rest
        while part := os.read(ours, 65536):
            shown += part
    os.close(theirs)
    os.close(ours)
    return done.stdout, shown.decode()


def test_on_a_terminal_it_is_shown_and_taken_away() -> None:
    printed, shown = on_a_terminal(0.0)
    assert printed == "done\n"
    assert "searching: 00:00" in shown
    assert "limits: " in shown
    assert "3/3" in shown or "2/3" in shown
    assert shown.rstrip("\r").endswith(" "), "the last bar is overwritten with spaces"


def test_a_quick_search_shows_no_bar() -> None:
    assert on_a_terminal(30.0) == ("done\n", "")


def test_elsewhere_there_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with ThreadPoolExecutor(1) as pool:
        assert progress.waited(pool.submit(abs, -1), lambda: "searching") == 1
    assert list(progress.track([1, 2], "limits")) == [1, 2]
    assert main(["pareto", "--num-ranks", "2", "--num-microbatches", "2", "--memory-limits", "1,2", "--effort", "fast"]) == 0
    assert capsys.readouterr().err == ""


def test_without_tqdm_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner needs the standard library only."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with ThreadPoolExecutor(1) as pool:
        assert progress.waited(pool.submit(abs, -1), lambda: "searching") == 1
    assert list(progress.track([1, 2], "limits")) == [1, 2]
