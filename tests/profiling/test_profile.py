"""From timed passes to costs."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import Op, OpKind, Placement
from megatron.zerobubble.profiling import marks
from megatron.zerobubble.profiling.profile import RankProfile, StageMemory, combine, unit_bytes
from megatron.zerobubble.profiling.profiler import Profiler


def test_the_typical_time_is_the_median_of_a_stage_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [("0F0", 0.010), ("0F1", 0.012), ("0F2", 0.500), ("3B0", 0.020), ("0W0", 0.004)]
    monkeypatch.setattr(marks.time, "perf_counter", lambda: next(readings))
    readings = accumulate(value for _, elapsed in 4 * passes for value in (1.0, elapsed))
    profiler = Profiler(torch.device("cpu"))

    def iterate() -> None:
        for text, _ in passes:
            op = Op.parse(text)
            profiler.start(op)
            profiler.end(op)
            profiler.settled(op, lambda: 0)

    for again in (False, False, True):
        with profiler:
            iterate()
            if again:
                profiler.rewind()
                iterate()
    assert profiler.profile().times_ms == {
        (0, OpKind.F): pytest.approx(12.0),
        (3, OpKind.B): pytest.approx(20.0),
        (0, OpKind.W): pytest.approx(4.0),
    }
    assert len(profiler._passes) == 2 * len(passes), "not the first iteration, not the one that was given up"


def _profile(**memory: tuple[float, float]) -> RankProfile:
    """Stage memory by keyword s0, s1, ...: (activation, after backward)."""
    held = {int(name[1:]): StageMemory(activation=a, after_backward=b) for name, (a, b) in memory.items()}
    return RankProfile(times_ms={(stage, kind): 1.0 for stage in held for kind in (OpKind.F, OpKind.B, OpKind.W)}, memory=held)


def test_memory_in_units_of_an_equal_part() -> None:
    """The unit is a rank's equal part of a microbatch's activation memory over all stages."""
    ranks = [_profile(s0=(400, 100), s3=(300, 300)), _profile(s1=(200, 50), s2=(200, 50)), _profile(s1=(100, 90), s2=(0, 0))]
    assert unit_bytes(ranks, Placement.v(2)) == 550
    costs = combine(ranks, Placement.v(2))
    assert costs.activation == pytest.approx([400 / 550, 200 / 550, 200 / 550, 300 / 550])
    assert costs.activation_after_backward == pytest.approx([100 / 550, 90 / 550, 50 / 550, 300 / 550])


def test_the_member_that_waits_least_has_the_time_of_the_all_to_alls() -> None:
    """Of two replicas the second one waits for the first. Stage 1 has no experts; without any measurement there is no share."""
    times = {(stage, kind): 4.0 for stage in (0, 1) for kind in (OpKind.F, OpKind.BW)}
    shared = [{(0, OpKind.F): each, (0, OpKind.BW): each / 2} for each in (2.0, 3.0)]
    ranks = [RankProfile(times_ms=times, memory={}, all_to_all_ms=each) for each in (*shared, {})]
    assert combine(ranks, Placement.linear(2)).all_to_all == (0.25, 0.125)
    assert combine(ranks[2:], Placement.linear(2)).all_to_all == (0.0, 0.0)


def test_a_stage_takes_as_long_as_its_slowest_member() -> None:
    first = {(0, OpKind.F): 1.0, (0, OpKind.B): 2.0, (0, OpKind.W): 3.0, (3, OpKind.F): 4.0, (3, OpKind.B): 5.0}
    twin = {**first, (0, OpKind.B): 2.5}
    second = {(stage, kind): 7.0 for stage in (1, 2) for kind in (OpKind.F, OpKind.BW)}
    ranks = [RankProfile(times_ms=times, memory={}) for times in (first, twin, second)]
    costs = combine(ranks, Placement.v(2), {(0, 1): LinkTime(0.15), (1, 0): LinkTime(0.25)})
    assert costs.forward_ms == (1.0, 7.0, 7.0, 4.0)
    assert costs.backward_ms == (2.5, 7.0, 7.0, 5.0)
    assert costs.wgrad_ms == (3.0, 0.0, 0.0, 0.0)
    assert costs.comm_ms == pytest.approx(0.2)
    assert costs.activation == (0.5, 0.5, 0.5, 0.5)


def test_a_stage_that_no_rank_timed_is_named() -> None:
    with pytest.raises(ExecutionError, match="no F of stage 1 was timed"):
        combine([_profile(s0=(1, 1))], Placement.linear(2))
