"""The simulator against published figures and closed forms. Its rules, with random times: `costs/test_unequal_costs`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.transforms import forward_only
from tests.plan.uneven_costs import uneven_costs

# Profiled times of arXiv 2401.10241, Table 9: p, m, F, B, W, link (ms), share of activations kept until W; then the
# bubble rates which that paper's scheduler reaches on them: 1F1B, 1F1B-I (two chunks), ZB-1p.
TABLE_9 = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.3664, 0.2431, 0.1396, 0.1585),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.4324, 0.2347, 0.1336, 0.1323),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.3664, 0.1240, 0.0588, 0.0674),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.4324, 0.2552, 0.1468, 0.1397),
]


@pytest.mark.parametrize("row", TABLE_9, ids=lambda row: f"p{row[0]}-m{row[1]}-F{row[2]}")
@pytest.mark.parametrize(("name", "column"), [("1f1b", 7), ("interleaved-1f1b", 8), ("zb-h1", 9), ("zb", 9)])
def test_published_bubble_rates(row: tuple[float, ...], name: str, column: int) -> None:
    plan = build_plan(name, num_ranks=int(row[0]), num_microbatches=int(row[1]))
    forward, backward, wgrad, comm, rest = row[2:7]
    costs = CostModel.uniform(
        plan.placement,
        forward_ms=forward,
        backward_ms=backward,
        wgrad_ms=wgrad,
        comm_ms=comm,
        activation_after_backward=rest,
    )
    simulation = simulate(plan, costs)
    assert round(simulation.bubble_rate, 4) == row[column]
    p = plan.num_ranks
    assert max(simulation.peak_memory) == pytest.approx(1 + (p - 1) / (2 * p) if name.startswith("inter") else 1.0)


def test_a_fused_backward_is_sent_when_the_whole_has_ended() -> None:
    plan = build_plan("1f1b", num_ranks=2, num_microbatches=1)
    rows = simulate(plan, CostModel.uniform(plan.placement, forward_ms=2, backward_ms=3, wgrad_ms=4)).rows
    assert rows[1][-1].end_ms == 11
    assert rows[0][-1].start_ms == 11


def test_a_link_costs_nothing_within_a_rank() -> None:
    plan = build_plan("zbv", num_ranks=1, num_microbatches=3)
    assert simulate(plan, CostModel.uniform(plan.placement, comm_ms=5.0)).bubble_rate == 0


def test_forward_only_has_the_memory_of_one_pass() -> None:
    plan = forward_only(build_plan("zbv", num_ranks=2, num_microbatches=4))
    simulation = simulate(plan, CostModel.uniform(plan.placement))
    assert simulation.peak_memory == (0.25, 0.25)
    assert [len(row) for row in simulation.rows] == [8, 8]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, CostModel]:
    name = draw(st.sampled_from([info.name for info in known_schedules()]))
    plan = build_plan(name, num_ranks=draw(st.integers(1, 4)), num_microbatches=draw(st.integers(1, 7)))
    times = st.floats(0.01, 10, allow_nan=False)
    return plan, uneven_costs(draw, plan.num_stages, times, shares=3.0)


@given(cases(), st.floats(0, 5))
def test_slower_links_never_help(case: tuple[Plan, CostModel], more: float) -> None:
    plan, costs = case
    body = costs.to_json()
    slower = CostModel.from_json(body | {"comm_ms": costs.comm_ms + more})
    assert simulate(plan, slower).makespan_ms >= simulate(plan, costs).makespan_ms * (1 - 1e-12)
