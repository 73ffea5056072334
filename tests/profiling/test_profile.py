"""From timed passes to costs."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.ir import Op, OpKind, Placement
from megatron.zerobubble.profiling import profile
from megatron.zerobubble.profiling.profile import PassTimer, combine


def test_the_typical_time_is_the_median_of_a_stage_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [("0F0", 0.010), ("0F1", 0.012), ("0F2", 0.500), ("3B0", 0.020), ("0W0", 0.004)]
    readings = iter(accumulate(value for _, elapsed in passes for value in (1.0, elapsed)))
    monkeypatch.setattr(profile.time, "perf_counter", lambda: next(readings))
    timer = PassTimer(torch.device("cpu"))
    for text, _ in passes:
        op = Op.parse(text)
        timer.start(op)
        timer.end(op)
    found = timer.typical()
    assert found == {
        (0, OpKind.F): pytest.approx(12.0),
        (3, OpKind.B): pytest.approx(20.0),
        (0, OpKind.W): pytest.approx(4.0),
    }
    assert timer.typical() == {}, "a window does not see the one before"


def test_a_stage_takes_as_long_as_its_slowest_member() -> None:
    first = {(0, OpKind.F): 1.0, (0, OpKind.B): 2.0, (0, OpKind.W): 3.0, (3, OpKind.F): 4.0, (3, OpKind.B): 5.0}
    twin = {**first, (0, OpKind.B): 2.5}
    second = {(stage, kind): 7.0 for stage in (1, 2) for kind in (OpKind.F, OpKind.BW)}
    costs = combine([first, twin, second], Placement.v(2), link_ms=[0.1, 0.3])
    assert costs.forward_ms == (1.0, 7.0, 7.0, 4.0)
    assert costs.backward_ms == (2.5, 7.0, 7.0, 5.0)
    assert costs.wgrad_ms == (3.0, 0.0, 0.0, 0.0)
    assert costs.comm_ms == pytest.approx(0.2)
    assert costs.activation == (0.5, 0.5, 0.5, 0.5)


def test_a_stage_that_nobody_timed_is_named() -> None:
    with pytest.raises(ExecutionError, match="no F of stage 1 was timed"):
        combine([{(0, OpKind.F): 1.0, (0, OpKind.B): 1.0}], Placement.linear(2))
