"""No program deadlocks on a GPU, for any number of hardware queues and with any call that synchronizes the device.

Sequential ranks are the strictest case (docs/adr/0003), which `stuck_ranks` decides. On the double of NCCL random plans run, too,
with what can hold a kernel up; `tests/runtime/test_on_fake_nccl.py` runs the families.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.zerobubble.plan.communication import place_communication, speculative_forwards
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.deadlock import stuck_ranks
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.transforms import forward_only
from tests.plan.test_communication import placements, random_plan
from tests.runtime.test_on_fake_nccl import run_seed
from tests.support.plans import text_of
from tests.support.program_checker import check
from tests.support.programs import FAMILIES

pytestmark = pytest.mark.claims(
    "Schedules",
    "ranks that do one thing at a time, the strictest case of shared hardware queues and device-wide synchronizations: no plan "
    "can deadlock, generated, searched or random",
    "works, in a model; **not run on a GPU**",
)


def plans(name: str, most_ranks: int) -> Iterator[Plan]:
    for num_ranks in range(2, most_ranks + 1):
        for num_microbatches in sorted({1, 2, num_ranks - 1, num_ranks, num_ranks + 1, 2 * num_ranks + 1, 3 * num_ranks}):
            options: list[dict[str, int]] = [{}]
            if name == "zb":
                options = [{"max_pending_backward": k} for k in (1, num_ranks - 1, num_ranks, num_ranks + 1, 2 * num_ranks)]
            for option in options:
                plan = build_plan(
                    name, num_ranks=num_ranks, num_microbatches=num_microbatches, **{k: max(1, v) for k, v in option.items()}
                )
                yield plan
                yield forward_only(plan)


def random_costs(placement: Placement, seed: int) -> CostModel:
    """Costs of stages that differ, some of which are 0."""
    choice = random.Random(seed)

    def draw() -> tuple[float, ...]:
        return tuple(choice.choice((0.0, 1.0, choice.uniform(0.1, 4.0))) for _ in range(placement.num_stages))

    ones = (1.0,) * placement.num_stages
    comm_ms = choice.choice((0.0, choice.uniform(0.0, 2.0)))
    return CostModel.of_lists(
        {"forward_ms": draw(), "backward_ms": draw(), "wgrad_ms": draw(), "activation": ones, "activation_after_backward": ones},
        comm_ms=comm_ms,
    )


@pytest.mark.parametrize("name", [info.name for info in known_schedules()])
@pytest.mark.sampled(0.23)
def test_every_family_keeps_the_promises_of_a_program_and_ends(name: str) -> None:
    for number, plan in enumerate(plans(name, 4 if name == "zb-w" else 8)):
        program = place_communication(plan)
        check(program)
        assert stuck_ranks(program) == (), plan
        check(place_communication(plan, lookahead=(0, 1, 3)[number % 3]))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(0.23)
def test_every_family_ends_with_a_fence(name: str) -> None:
    for plan in plans(name, 3 if name == "zb-w" else 6):
        if any(op.kind is not OpKind.F for row in plan.ops for op in row):
            for seed, costs in enumerate((None, *(random_costs(plan.placement, seed) for seed in range(6)))):
                program = place_communication(plan, costs=costs, fence=speculative_forwards(plan))
                assert stuck_ranks(program) == (), f"costs of seed {seed}\n{text_of(plan)}"


@pytest.mark.parametrize(
    ("name", "limit"),
    [("zb", 1.0), *((name, limit) for name in ("zbv", "zb-interleaved") for limit in (0.5, 0.75, 1.0))],
)
@pytest.mark.sampled(0.28)
def test_searched_plans_end(name: str, limit: float) -> None:
    """Three of these had a cycle in one hardware queue when receives were posted one op early."""
    options = SearchOptions(memory_limit=max(limit, 0.75) if name == "zb-interleaved" else limit, budget=2000.0)
    found = make_plan(
        PlanRequest(schedule=name, num_ranks=8, num_microbatches=24, stages=CostModel.uniform, options=options)
    ).simulation
    for costs in (None, found.costs):
        assert stuck_ranks(place_communication(found.plan, costs=costs)) == ()


@given(placements(), st.integers(1, 5), st.integers(0, 10**6))
def test_any_valid_plan_ends_with_any_costs(placement: Placement, num_microbatches: int, seed: int) -> None:
    plan = random_plan(placement, num_microbatches, seed)
    program = place_communication(plan, costs=random_costs(placement, seed))
    check(program)
    assert stuck_ranks(program) == (), plan
    check(place_communication(plan, lookahead=seed % 4))


@settings(max_examples=10)
@given(placements(), st.integers(1, 3), st.integers(0, 10**6))
def test_any_valid_plan_ends_on_the_double_of_nccl(placement: Placement, num_microbatches: int, seed: int) -> None:
    """Each seed has another hazard: a device-wide synchronization in some or all ops, a new communicator, one queue."""
    plan = random_plan(placement, num_microbatches, seed)
    assume(not {OpKind.B, OpKind.BW} <= {op.kind for row in plan.ops for op in row})  # which its work does not tell apart
    run_seed(place_communication(plan, costs=random_costs(placement, seed)), seed)


# -- tests that the tests can fail ----------------------------------------------------------------------------------------


def test_a_stuck_rank_is_named() -> None:
    program = place_communication(build_plan("zb-h1", num_ranks=2, num_microbatches=4), lookahead=1)
    stuck = stuck_ranks(program)
    assert [each.rank for each in stuck] == [0, 1]
    assert [each.text(program.steps[each.rank][each.step].ops) for each in stuck] == [
        "rank 0 at 0F1, receiving the gradient for stage 0, microbatch 0, from rank 1",
        "rank 1 at 1B0, receiving the activation for stage 1, microbatch 1, from rank 0",
    ]


def test_a_fence_that_no_rank_can_reach_is_found() -> None:
    """Rank 0 would wait at its fence for rank 1, whose fence comes behind a message that rank 0 sends behind its own."""
    program = place_communication(build_plan("1f1b", num_ranks=2, num_microbatches=4))
    stuck = stuck_ranks(replace(program, fence=(1, 3)))
    assert [(each.rank, each.waits_for is None) for each in stuck] == [(0, True), (1, False)]
