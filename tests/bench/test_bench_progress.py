"""Lines with the time left, nothing on other ranks."""

from __future__ import annotations

import io

import pytest

from megatron.zerobubble.bench.bench_progress import BenchProgress, duration_text


def test_lines_come_from_the_start_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("megatron.zerobubble.bench.bench_progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = BenchProgress(10, is_quiet=False, stream=stream)
    progress.say("begin")
    progress.block("zbv, round 1 of 3")
    for _ in range(4):
        now[0] += 10.0
        progress.tick()
    progress.skip(2)
    progress.say("zbv failed")
    assert stream.getvalue().splitlines() == [
        "[0/10 iterations] begin",
        "[4/10 iterations, about 1 min 0 s left] zbv, round 1 of 3",
        "[4/8 iterations, about 40 s left] zbv failed",
    ]


def test_other_ranks_are_quiet() -> None:
    stream = io.StringIO()
    progress = BenchProgress(4, is_quiet=True, stream=stream)
    progress.say("begin")
    progress.tick()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
