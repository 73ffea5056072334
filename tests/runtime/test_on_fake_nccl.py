"""Every family on the fake NCCL: random delays on all hosts, links and kernels, and everything that synchronizes inside of ops.

A seed names one order of everything, so what fails here fails again. The plain run has a few seeds per family; `-m slow` has a
thousand with two ranks and two hundred with four.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megatron.zerobubble.plan.communication import Program, place_communication, speculative_forwards
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.transforms import forward_only
from tests.runtime.on_fake_nccl import Hazard, Setup, run_program
from tests.support.fake_nccl.engine import FakeNcclError, StuckError
from tests.support.programs import FAMILIES

pytestmark = pytest.mark.claims(
    "Schedules",
    "every schedule on a double of NCCL (sends without a buffer, work on streams behind events, communicators made at first "
    "use or eagerly, memory handed out again at once, clocks that find accesses which nothing orders), 1,000 random orders "
    "with p = 2 and 200 with p = 4, with a device-wide synchronization or a new communicator inside ops, and with one "
    "hardware queue; discarded first forwards; every rule for order, buffers and streams broken once is noticed; receives "
    "posted one op early deadlock",
    "works on the double; **not run on a GPU**",
    also=("runtime/test_rules_on_fake_nccl.py", "support/test_fake_nccl.py"),
)

HAZARDS = list(Hazard)


def program_of(name: str, p: int, *, m: int = 8, lookahead: int | None = None) -> Program:
    return place_communication(build_plan(name, num_ranks=p, num_microbatches=m), lookahead=lookahead)


def run_seed(program: Program, seed: int) -> int:
    """One run, with the hazard, the communicators and the hardware queues that belong to the seed; number of reuses of memory."""
    hazard = HAZARDS[seed % len(HAZARDS)]
    setup = Setup(hazard=hazard, replicas=2 if hazard is Hazard.COMMUNICATOR else 1)
    results = run_program(program, seed, setup, eager=seed % 4 == 1, single_queue=seed % 4 >= 2)
    for rank, result in enumerate(results):
        assert not result.stalls, f"rank {rank}: a retired send was still under way"
    return sum(result.num_reused for result in results)


def outcomes(program: Program, setup: Setup, seeds: range, **options: Any) -> Counter[str]:
    """How often runs end how."""
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            results = run_program(program, seed, setup, **options)
            found["stalls" if any(result.stalls for result in results) else "ends"] += 1
        except (Exception, FakeNcclError) as error:  # noqa: BLE001 - counted
            found[type(error).__name__] += 1
    return found


@pytest.mark.parametrize(("p", "num_seeds"), [(2, 20), (4, 5)])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_ends_under_random_delays_and_synchronizations(name: str, p: int, num_seeds: int) -> None:
    program = program_of(name, p)
    reused = sum(run_seed(program, seed) for seed in range(num_seeds))
    assert reused > 100, "no memory was handed out again: the test says nothing about reuse"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("p", "num_seeds"), [(2, 1000), (4, 200)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_thousand_random_delays(name: str, p: int, num_seeds: int, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_of(name, p)
    for seed in range(num_seeds):
        run_seed(program, seed)
        if (seed + 1) % 200 == 0:
            with capsys.disabled():
                print(f"\n{name}, {p} ranks: {seed + 1} of {num_seeds} random delays", end="", flush=True)  # noqa: T201


@pytest.mark.parametrize("name", FAMILIES)
def test_evaluation(name: str) -> None:
    program = place_communication(forward_only(build_plan(name, num_ranks=3, num_microbatches=4)))
    for seed in range(5):
        run_seed(program, seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_first_forwards_that_are_discarded_and_run_again(name: str) -> None:
    """Rollback of an optimistic optimizer step: the messages of the discarded ops are received and dropped."""
    plan = build_plan(name, num_ranks=3, num_microbatches=6)
    program = place_communication(plan, fence=speculative_forwards(plan))
    assert any(program.unread(rank) for rank in range(3))
    found = outcomes(program, Setup(rewinds=True, iterations=2), range(6))
    assert found["ends"] == 6, found


# -- D3: receives posted an op early, and something waits for the whole device inside of an op --------------------------------


HANG_WITH_A_SYNC_IN_EVERY_OP = [name for name in FAMILIES if name != "zb-h2"]


@pytest.mark.parametrize("name", HANG_WITH_A_SYNC_IN_EVERY_OP)
@pytest.mark.parametrize("p", [2, 4])
def test_receives_posted_one_op_early_deadlocked(name: str, p: int) -> None:
    """The placement of before, and today's, under the same delays."""
    setup = Setup(hazard=Hazard.SYNC_ALWAYS)
    assert outcomes(program_of(name, p, lookahead=1), setup, range(3)) == {"StuckError": 3}
    assert outcomes(program_of(name, p), setup, range(3)) == {"ends": 3}


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_kernels_loaded_at_their_first_use_deadlocked(name: str) -> None:
    setup = Setup(hazard=Hazard.SYNC_FIRST)
    assert outcomes(program_of(name, 4, lookahead=1), setup, range(3)) == {"StuckError": 3}
    assert outcomes(program_of(name, 4), setup, range(3)) == {"ends": 3}


def test_receives_posted_at_their_op_deadlock_in_one_hardware_queue() -> None:
    """So that posting later is no way out."""
    assert outcomes(program_of("zbv", 2, lookahead=0), Setup(), range(3), single_queue=True) == {"StuckError": 3}
    assert outcomes(program_of("zbv", 2), Setup(), range(3), single_queue=True) == {"ends": 3}


def test_a_deadlock_is_reported_with_what_every_rank_waits_for() -> None:
    with pytest.raises(StuckError) as error:
        run_program(program_of("1f1b", 2, lookahead=1), 0, Setup(hazard=Hazard.SYNC_ALWAYS))
    text = str(error.value)
    assert "rank 0, the host of rank 0: waits for a device-wide synchronization in 0F" in text
    assert "is next, 0 behind it" in text
    assert "receive" in text
