"""Which iterations are recorded and kept, and when clocks are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.timeline import RankTimeline
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.profiling.recordings import EARLY, RECORD_EVERY, Recordings

pytestmark = pytest.mark.usefixtures("world_of_one")

PLAN = build_plan("zb-h1", num_ranks=1, num_microbatches=2)


class Run:
    """Iterations of one rank whose clock is asked for its offset, 100 ms, and then 100 more each time."""

    def __init__(self) -> None:
        self.recorder = OpRecorder(torch.device("cpu"))
        self.log: list[str] = []
        self.recordings = Recordings(self.recorder, self._offset)

    def iterate(self, *iterations: int) -> None:
        for iteration in iterations:
            recorder = self.recordings.begin(PLAN)
            self.log.append(f"{'recorded' if recorder else 'ran'} {iteration}")
            for op in PLAN.ops[0] if recorder else ():
                self.recorder.start(op)
                self.recorder.end(op)

    def recorded(self) -> list[str]:
        return [line for line in self.log if not line.startswith("ran")]

    def _offset(self) -> float:
        self.log.append("compared")
        return 100.0 * self.log.count("compared")


def test_by_default_a_few_early_ones_and_every_twentieth_and_the_last_is_kept() -> None:
    run = Run()
    run.iterate(*range(1, 2 * RECORD_EVERY))
    assert run.recorded() == [f"recorded {number}" for number in (*EARLY, RECORD_EVERY + 2)]
    (timeline,) = run.recordings.gather(None, num_ranks=1)
    assert timeline.iteration == RECORD_EVERY + 2
    assert timeline.plan is PLAN
    assert [timed.op for timed in timeline.rows[0]] == list(PLAN.ops[0])
    own = run.recorder.timed_ops()
    assert [timed.start_ms for timed in timeline.rows[0]] == [timed.start_ms + 100.0 for timed in own]


def test_chosen_iterations_are_all_kept_and_clocks_are_not_compared_between_them() -> None:
    run = Run()
    run.recordings.choose([3, 4, 7, 59])
    run.iterate(*range(1, 10))
    assert run.recorded() == ["recorded 2", "recorded 3", "recorded 4", "compared", "recorded 7", "compared"]
    assert run.log.index("compared") == run.log.index("ran 5") - 1
    timelines = run.recordings.gather(None, num_ranks=1)
    assert [timeline.iteration for timeline in timelines] == [3, 4, 7]


def test_chosen_iterations_that_did_not_run_leave_the_last_recorded_one() -> None:
    run = Run()
    run.recordings.choose([99])
    run.iterate(1, 2, 3)
    assert [timeline.iteration for timeline in run.recordings.gather(None, num_ranks=1)] == [2]


def test_where_every_iteration_is_timed_only_chosen_ones_are_recorded() -> None:
    run = Run()
    run.recordings.only_chosen = True
    run.recordings.choose([6])
    run.iterate(*range(1, 2 * RECORD_EVERY))
    assert run.recorded() == ["recorded 6", "compared"]


def test_a_short_run_keeps_none_of_its_first_iterations() -> None:
    run = Run()
    run.iterate(*range(1, 11))
    assert [timeline.iteration for timeline in run.recordings.gather(None, num_ranks=1)] == [7]


def test_a_disturbed_iteration_is_recorded_only_if_chosen() -> None:
    run = Run()
    run.recordings.choose([3])
    began = [run.recordings.begin(PLAN, is_disturbed=True) is not None for _ in range(4)]
    assert began == [False, False, True, False]


def test_nothing_is_recorded_before_a_second_iteration() -> None:
    run = Run()
    run.iterate(1)
    assert run.recordings.gather(None, num_ranks=1) == []
    assert "compared" not in run.log


def test_an_iteration_ends_where_the_next_one_begins() -> None:
    """What comes after the passes belongs to it; what comes later does not."""
    from megatron.zerobubble.plan.timeline import Activity

    run = Run()
    run.iterate(1, 2)
    with run.recorder.span(Activity.OPTIMIZER):
        pass
    run.iterate(3)
    with run.recorder.span(Activity.OPTIMIZER):
        pass
    (timeline,) = run.recordings.gather(None, num_ranks=1)
    assert [span.activity for span in timeline.ranks[0].spans] == [Activity.OPTIMIZER]


def test_the_devices_peak_is_not_reported_if_measuring_passes_resets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    own = run.recorder.reader
    monkeypatch.setattr(run.recorder, "reader", lambda: lambda: replace(own()(), peak_bytes=7))
    run.recordings.choose([1, 2])
    for is_disturbed in (True, False):
        run.recordings.begin(PLAN, is_disturbed=is_disturbed)
    timelines = run.recordings.gather(None, num_ranks=1)
    assert [timeline.ranks[0].peak_bytes for timeline in timelines] == [None, 7]


def test_recordings_are_read_when_they_are_gathered_and_not_between_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading waits for the device."""
    run = Run()
    reads: list[RankTimeline] = []
    take = run.recorder.reader

    def counting() -> Callable[[], RankTimeline]:
        read = take()

        def read_and_count() -> RankTimeline:
            reads.append(read())
            return reads[-1]

        return read_and_count

    monkeypatch.setattr(run.recorder, "reader", counting)
    run.iterate(*range(1, 30))
    assert reads == []
    (timeline,) = run.recordings.gather(None, num_ranks=1)
    assert len(reads) == 1
    assert len(timeline.rows[0]) == len(PLAN.ops[0]), "it is of its own iteration"
