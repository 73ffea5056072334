"""Every family over a grid of p and m: valid, within its memory, at its closed form, and as its docstring draws it."""

import importlib
import math

import pytest

from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.generators.zb import timed_zb
from megatron.zerobubble.plan.generators.zbv import zbv_pattern
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.validate import live_microbatches, pending_wgrads, validate

RANKS = range(1, 9)


def microbatches(p: int) -> range:
    """m from 1 to 3p: below, equal to and above the number of ranks."""
    return range(1, 3 * p + 1)


def idle_of(plan: Plan) -> float:
    """Ticks of bubble in the span, with one tick for each of F, B and W per rank, and free links."""
    simulation = simulate(plan, CostModel.uniform(plan.placement))
    return round(simulation.span_ms - 3 * plan.num_microbatches, 9)


def peaks_in_microbatches(plan: Plan, rest: float) -> list[float]:
    """Peak activation memory per rank in microbatches, with the fraction `rest` kept after B."""
    costs = CostModel.uniform(plan.placement, activation_after_backward=rest)
    unit = min(plan.num_ranks, plan.num_microbatches)
    return [peak * unit for peak in simulate(plan, costs).peak_memory]


DRAWN = [
    # module of the generator, name, p, m, slices
    ("one_f_one_b", "1f1b", 4, 6, 1),
    ("interleaved_1f1b", "interleaved-1f1b", 2, 4, 1),
    ("zb_h1", "zb-h1", 4, 6, 1),
    ("zb_h2", "zb-h2", 3, 6, 1),
    ("zb", "zb", 4, 6, 1),
    ("zbv", "zbv", 2, 4, 1),
    ("v_half", "v-half", 4, 5, 1),
    ("v_min", "v-min", 4, 5, 1),
    ("one_f_one_b_v", "1f1b-v", 3, 3, 1),
    ("zb_interleaved", "zb-interleaved", 2, 4, 1),
    ("one_f_one_b", "1f1b", 3, 2, 2),
    ("zb_h1", "zb-h1", 3, 2, 2),
    ("zb_h2", "zb-h2", 3, 2, 2),
    ("zb", "zb", 3, 2, 2),
    ("zbv", "zbv", 2, 2, 2),
    ("v_half", "v-half", 3, 2, 2),
]


@pytest.mark.parametrize(("module", "name", "p", "m", "n"), DRAWN)
def test_a_generator_makes_the_plan_that_its_docstring_draws(module: str, name: str, p: int, m: int, n: int) -> None:
    """With slices below the drawing without."""
    if (name, n) == ("zbv", 2):
        plan = zbv_pattern(p, m, n)
    else:
        pending = 5 if (name, n) == ("zb", 1) else None
        plan = build_plan(name, num_ranks=p, num_microbatches=m, num_slices=n, max_pending_backward=pending)
    doc = importlib.import_module(f"megatron.zerobubble.plan.generators.{module}").__doc__ or ""
    shown = [line.strip() for line in doc.splitlines() if line.strip().startswith("rank ")]
    each = 1.0 if n == 1 else 2.0 * plan.placement.num_chunks
    costs = CostModel.uniform(plan.placement, forward_ms=each, backward_ms=each, wgrad_ms=each)
    _, *rows = render_text(simulate(plan, costs).rows).splitlines()
    assert (shown[:p] if n == 1 else shown[-p:]) == rows


# -- closed forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", RANKS)
def test_1f1b(p: int) -> None:
    for m in microbatches(p):
        plan = build_plan("1f1b", num_ranks=p, num_microbatches=m)
        assert idle_of(plan) == 3 * (p - 1)
        assert simulate(plan, CostModel.uniform(plan.placement)).bubble_rate == pytest.approx((p - 1) / (m + p - 1))
        assert peaks_in_microbatches(plan, 0.5) == [min(p - rank, m) for rank in range(p)]
        assert pending_wgrads(plan) == (0,) * p


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_interleaved_1f1b(p: int, v: int) -> None:
    for m in microbatches(p):
        plan = build_plan("interleaved-1f1b", num_ranks=p, num_microbatches=m, num_chunks=v)
        assert max(peaks_in_microbatches(plan, 0.5)) <= p + (p - 1) / v + 1e-9
        if m % p == 0:
            ramp = (p - 1) / v
            rate = simulate(plan, CostModel.uniform(plan.placement)).bubble_rate
            assert rate == pytest.approx(ramp / (m + ramp))
        if m >= 2 * p and v > 1:
            assert max(peaks_in_microbatches(plan, 0.5)) == pytest.approx(p + (p - 1) / v)
    assert plan.placement.name == ("linear" if v == 1 else "V" if p == 1 and v == 2 else "loop")


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_and_zb_h2(name: str, p: int) -> None:
    ahead = 1 if name == "zb-h1" else 2
    for m in microbatches(p):
        plan = build_plan(name, num_ranks=p, num_microbatches=m)
        assert idle_of(plan) == max((2 - ahead) * (p - 1), 2 * p - 1 - m)
        for rest in (0.0, 0.375, 1.0):
            peaks = peaks_in_microbatches(plan, rest)
            bounds = [ahead * (p - rank - 1) + 1 + ahead * rank * rest for rank in range(p)]
            assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
            if m >= ahead * (p - 1) + 1:
                assert peaks == bounds
        one_f_one_b = build_plan("1f1b", num_ranks=p, num_microbatches=m)
        assert max(peaks_in_microbatches(plan, 1.0)) <= ahead * max(peaks_in_microbatches(one_f_one_b, 1.0))


@pytest.mark.parametrize("times", [(3, 3, 1), (2, 3, 2), (2, 2, 1)])
def test_zb_h1_with_uneven_passes(times: tuple[int, int, int]) -> None:
    """The paper's (p-1)*(T_F + T_B - T_W)."""
    forward, backward, wgrad = times
    for p in (2, 4, 8):
        plan = build_plan("zb-h1", num_ranks=p, num_microbatches=3 * p)
        costs = CostModel.uniform(plan.placement, forward_ms=forward, backward_ms=backward, wgrad_ms=wgrad)
        assert simulate(plan, costs).span_ms - 3 * p * sum(times) == (p - 1) * (forward + backward - wgrad)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.sampled(0.5)
def test_zb_at_any_number_of_pending_microbatches(p: int) -> None:
    for k in range(1, 2 * p + 2):
        for m in {1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p} - {0}:
            plan = build_plan("zb", num_ranks=p, num_microbatches=m, max_pending_backward=k)
            assert max(live_microbatches(plan)) <= min(k, m)
            if k >= p:
                assert idle_of(plan) == max(2 * p - 1 - k, 2 * p - 1 - m, 0)
            else:
                assert idle_of(plan) <= 2 * (p - 1) * -(-m // k)


@pytest.mark.parametrize("p", RANKS)
def test_zb_has_zb_h1_and_zb_h2_among_its_points(p: int) -> None:
    for m in microbatches(p):
        h1, h2 = (build_plan(name, num_ranks=p, num_microbatches=m) for name in ("zb-h1", "zb-h2"))
        assert build_plan("zb", num_ranks=p, num_microbatches=m, max_pending_backward=p).ops == h1.ops
        for k in (2 * p - 1, 2 * p):
            assert build_plan("zb", num_ranks=p, num_microbatches=m, max_pending_backward=k).ops == h2.ops


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.sampled(0.25)
def test_zb_for_measured_times(p: int) -> None:
    """Valid; at twice 1F1B's memory close to no bubble in spite of uneven passes and slow links."""
    for m in (1, p, 3 * p):
        costs = CostModel.uniform(
            Placement.linear(p),
            forward_ms=28.8,
            backward_ms=28.7,
            wgrad_ms=19.3,
            comm_ms=1.6,
            activation_after_backward=0.43,
        )
        for limit in (1 / min(p, m), 0.7 + 1 / p, 2.0, math.inf):
            plans = [draw(m) for draw in timed_zb(p, costs, limit * min(p, m))]
            for plan in plans:
                validate(plan)
            if limit == 2.0 and m == 3 * p:
                fitting = [simulate(plan, costs) for plan in plans if max(peak_memory(plan, costs)) <= limit]
                assert min(simulation.bubble_rate for simulation in fitting) < 0.1
    free = CostModel.uniform(Placement.linear(p), forward_ms=0, backward_ms=0, wgrad_ms=0, activation_after_backward=0)
    for draw in timed_zb(p, free, 5.0):
        validate(draw(3))


@pytest.mark.parametrize("p", RANKS)
def test_zbv(p: int) -> None:
    for m in microbatches(p):
        plan = build_plan("zbv", num_ranks=p, num_microbatches=m)
        pattern = zbv_pattern(p, m)
        idle = 0 if m >= 2 * p else 2 * p - m if m > p else 2 * p - 1 - m
        assert idle_of(pattern) == idle
        for each in (plan, pattern):
            live = live_microbatches(each)
            assert max(live) <= 2 * min(p, m)
            validate(each, memory_limit=1.0)
        if m >= 2 * p:
            assert plan.ops == pattern.ops
            assert live == (2 * p,) * p
            assert simulate(plan, CostModel.uniform(plan.placement)).peak_memory == (1.0,) * p
        else:
            others = [idle_of(build_plan(name, num_ranks=p, num_microbatches=m)) for name in ("v-half", "v-min")]
            assert idle_of(plan) <= min(idle, *others), m
            assert idle_of(plan) < idle or p == 1 or m == 2 * p - 1, m


@pytest.mark.parametrize(("p", "n"), [(2, 2), (4, 2), (4, 4), (8, 2)])
def test_zbv_of_slices_is_never_slower_than_its_pattern(p: int, n: int) -> None:
    for m in range(1, 2 * p // n + 3):
        plan, pattern = build_plan("zbv", num_ranks=p, num_microbatches=m, num_slices=n), zbv_pattern(p, m, n)
        costs = CostModel.uniform(plan.placement).divided(n)
        chosen, written = simulate(plan, costs), simulate(pattern, costs)
        assert chosen.span_ms < written.span_ms if m * n < 2 * p else chosen.span_ms <= written.span_ms, m
        assert chosen.makespan_ms <= written.makespan_ms, m
        assert max(chosen.peak_memory) <= max(written.peak_memory), m


def test_the_bound_is_reached_with_few_microbatches() -> None:
    plan = build_plan("zbv", num_ranks=8, num_microbatches=4)
    simulation = simulate(plan, CostModel.uniform(plan.placement))
    assert simulation.span_ms == 19.5 == pytest.approx(lower_bound(plan.placement, 4, simulation.costs, 1.0).span_ms)
