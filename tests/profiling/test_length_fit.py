"""Costs by length from profiles of several ranks."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.costs.length_model import Work
from megatron.zerobubble.plan.ir import OpKind, Placement
from megatron.zerobubble.profiling.length_fit import fit_lengths
from megatron.zerobubble.profiling.profile import ByLength, RankProfile, StageMemory

TOKENS = (100, 250, 400, 900)
TERMS = {OpKind.F: Work(0.5, 0.01, 2e-6), OpKind.B: Work(0.25, 0.02, 4e-6), OpKind.W: Work(0.125, 0.01, 0.0)}
BYTES_PER_TOKEN = 1000.0


def profile(stage: int, tokens: tuple[int, ...] = TOKENS, *, has_memory: bool = True, is_fused: bool = False) -> RankProfile:
    """A rank whose stage takes stage + 1 times as long as the terms say."""

    def passes(kind: OpKind) -> tuple[ByLength[float], ...]:
        return tuple(ByLength(n, float(n * n), (stage + 1) * TERMS[kind].at(n, n * n)) for n in tokens)

    kinds = {OpKind.F: OpKind.F, OpKind.BW: OpKind.B} if is_fused else {kind: kind for kind in TERMS}
    held = tuple(
        ByLength(n, float(n * n), StageMemory(activation=(stage + 1) * BYTES_PER_TOKEN * n, after_backward=500.0 * n))
        for n in tokens
    )
    return RankProfile(
        times_ms={},
        memory={},
        timed={(stage, named): passes(kind) for named, kind in kinds.items()},
        measured={stage: held} if has_memory else {},
    )


def test_times_and_memory_of_each_stage() -> None:
    model, unit = fit_lengths([profile(0), profile(1)], Placement.linear(2), usual_tokens=1000)
    costs = model.costs([300])
    for stage in (0, 1):
        for name, kind in (("forward_ms", OpKind.F), ("backward_ms", OpKind.B), ("wgrad_ms", OpKind.W)):
            assert getattr(costs, name)[stage][0] == pytest.approx((stage + 1) * TERMS[kind].at(300, 300**2)), (stage, name)
    assert unit == pytest.approx(1.5e6), "the mean over two ranks of a usual microbatch: 1 and 2 MB"
    assert [row[0] * unit for row in costs.activation] == pytest.approx([3e5, 6e5])
    assert [row[0] * unit for row in costs.activation_after_backward] == pytest.approx([1.5e5, 1.5e5])


def test_all_ranks_of_a_stage_are_counted() -> None:
    """Replicas have measured other lengths; two lengths alone would not say how much grows with the square."""
    ranks = [profile(0, (100, 250)), profile(0, (400, 900))]
    model, _ = fit_lengths(ranks, Placement.linear(1), usual_tokens=1000)
    assert model.forward_ms[0] == pytest.approx(TERMS[OpKind.F])


def test_memory_that_was_not_measured_grows_with_the_tokens() -> None:
    model, unit = fit_lengths([profile(0, has_memory=False)], Placement.linear(1), usual_tokens=1000)
    assert unit == 0
    assert model.costs([1000, 500]).activation == ((1.0, 0.5),)


def test_fused_backwards_have_no_wgrad() -> None:
    model, _ = fit_lengths([profile(0, is_fused=True)], Placement.linear(1), usual_tokens=1000)
    assert model.costs([300]).wgrad_ms == ((0.0,),)
    assert model.costs([300]).backward_ms[0][0] == pytest.approx(TERMS[OpKind.B].at(300, 300**2))


def test_a_stage_that_was_not_timed() -> None:
    with pytest.raises(ExecutionError, match="no F of stage 1 was timed by length"):
        fit_lengths([profile(0)], Placement.linear(2), usual_tokens=1000)


def test_memory_in_units_of_a_limit_per_rank() -> None:
    model, _ = fit_lengths([profile(0), profile(1)], Placement.linear(2), usual_tokens=1000)
    scaled = model.within([2.0, 0.5])
    before, after = model.costs([300]).activation, scaled.costs([300]).activation
    assert after[0][0] == pytest.approx(2 * before[0][0])
    assert after[1][0] == pytest.approx(before[1][0] / 2)
    assert scaled.forward_ms == model.forward_ms
    assert "for 1000 tokens" in model.text(1000)
