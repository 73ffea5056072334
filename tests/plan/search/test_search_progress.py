"""A search that is followed, stopped, or run on several threads: what it reports, and which plan it returns."""

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.search import search
from megatron.zerobubble.plan.search.core import Core
from megatron.zerobubble.plan.search.interface import Order, Problem
from megatron.zerobubble.plan.search.orders import SeedOrder
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.search.search_progress import Progress
from megatron.zerobubble.plan.search.tuning import Tuning
from megatron.zerobubble.plan.simulate import Simulation
from megatron.zerobubble.plan.validate import validate

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "a search on 1, 2, 3 and 5 threads finds the same plan; stopped at any moment it returns a valid one",
    "works",
)


def costs_of(placement: Placement) -> CostModel:
    return CostModel.uniform(
        placement, forward_ms=18.5, backward_ms=18.1, wgrad_ms=9.3, comm_ms=0.6, activation_after_backward=0.37
    )


@pytest.mark.parametrize(("schedule", "limit", "m"), [("zbv", 0.8, 9), ("v-min", 0.6, 40), ("zb", 1.5, 9), ("auto", 1.2, 8)])
def test_the_plan_does_not_depend_on_the_number_of_workers(schedule: str, limit: float, m: int) -> None:
    plans = set()
    for workers in (1, 2, 3, 5):
        options = SearchOptions(memory_limit=limit, budget=2e6, workers=workers)
        plans.add(
            make_plan(
                PlanRequest(schedule=schedule, num_ranks=4, num_microbatches=m, stages=costs_of, options=options)
            ).simulation.plan
        )
    assert len(plans) == 1


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_large_budget_is_the_best_of_several_seeds(workers: int) -> None:
    share = 2e5
    tuning = Tuning(least_of_several=share, enough_per_op=0.0)

    def found(budget: float, seed: int = 0, workers: int = 1) -> Simulation:
        options = SearchOptions(memory_limit=0.5, budget=budget, seed=seed, workers=workers, tuning=tuning)
        return make_plan(
            PlanRequest(schedule="v-min", num_ranks=5, num_microbatches=11, stages=costs_of, options=options)
        ).simulation

    alone = [found(share, seed * tuning.seeds_apart) for seed in range(4)]
    assert len({simulation.span_ms for simulation in alone}) > 1, "seeds differ here"
    assert found(4 * share, workers=workers).plan == min(alone, key=lambda simulation: simulation.span_ms).plan


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_several_searches_end_with_the_first_that_reaches_the_bound_or_fails(
    workers: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later searches are made to end only where they are stopped."""
    real, stopped = search._Finder.found, []

    def found(finder: search._Finder, seed_orders: Sequence[SeedOrder]) -> tuple[float, Order, bool]:
        if finder._options.seed == 0:
            if fails:
                raise MemoryError
            return *real(finder, seed_orders)[:2], True
        deadline = time.monotonic() + 30
        while not finder._progress.is_stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        stopped.append(finder._progress.is_stopped)
        return 0.0, [], True

    monkeypatch.setattr(search._Finder, "found", found)
    tuning = Tuning(least_of_several=1e5, enough_per_op=0.0)
    options = SearchOptions(memory_limit=0.5, budget=4e5, workers=workers, tuning=tuning)
    with pytest.raises(MemoryError) if fails else nullcontext():
        plan = make_plan(
            PlanRequest(schedule="v-min", num_ranks=4, num_microbatches=8, stages=costs_of, options=options)
        ).simulation.plan
        validate(plan)
    assert all(stopped)
    assert stopped or workers == 1


def test_times_of_a_smaller_instance_are_not_those_of_the_plan() -> None:
    """With many microbatches a search first solves fewer of them, and several searches do so at different times."""
    seen: list[tuple[str, float, float]] = []
    options = SearchOptions(
        memory_limit=0.8,
        budget=5e5,
        progress=Progress(lambda *report: seen.append(report)),
        tuning=Tuning(least_of_several=1e5, enough_per_op=0.0),
    )
    found = make_plan(PlanRequest(schedule="zbv", num_ranks=2, num_microbatches=40, stages=costs_of, options=options))
    times = [best for name, best, _ in seen if name == "zbv"]
    assert len({name for name, _, _ in seen}) == 2
    assert min(times) == pytest.approx(found.simulation.span_ms)


def test_a_search_with_progress_reports_times_that_never_rise() -> None:
    seen: list[tuple[str, float, float]] = []
    progress = Progress(lambda *report: seen.append(report))
    options = SearchOptions(memory_limit=0.8, budget=5e6, progress=progress)
    found = make_plan(PlanRequest(schedule="zbv", num_ranks=4, num_microbatches=9, stages=costs_of, options=options))
    assert seen
    assert {name for name, _, _ in seen} == {"zbv"}
    times = [best for _, best, _ in seen]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(found.simulation.span_ms)
    assert all(bound == pytest.approx(found.bound.span_ms) for _, _, bound in seen)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("schedule", ["v-min", "auto"])
def test_a_stopped_search_returns_the_best_so_far(schedule: str, workers: int) -> None:
    """The budget is hours; a stop ends the search in the middle of a round of annealing."""
    progress = Progress()
    options = SearchOptions(memory_limit=0.6, budget=1e13, progress=progress, workers=workers)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(
            make_plan(PlanRequest(schedule=schedule, num_ranks=4, num_microbatches=9, stages=costs_of, options=options))
        )
    )
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    progress.stop()
    thread.join(60)
    assert not thread.is_alive()
    plan = found[0].simulation.plan
    validate(plan, memory_limit=0.6, costs=costs_of(plan.placement))
    again = SearchOptions(memory_limit=0.6, budget=1e13, progress=progress)
    assert make_plan(
        PlanRequest(schedule=schedule, num_ranks=4, num_microbatches=9, stages=costs_of, options=again)
    ).simulation.plan


def test_a_core_that_was_stopped_no_longer_anneals() -> None:
    placement = Placement.v(2)
    costs = costs_of(placement)
    core = Core(Problem.of(placement, 4, costs, limit=2.0, is_makespan=False))
    rows = [b"\x00\x03\x04\x05\x01\x02" * 4, b"\x00\x03\x04\x05\x01\x02" * 4]
    core.stop()
    before = core.work
    core.anneal(rows, [0.5, 0.5], 1, 1e12, 1.0)
    assert core.work - before < 1000
