"""What is measured in a run: recordings on one clock, memory, and re-planning with both, which changes no result."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.mcore.replanner import Replanner, Window, _of_rank_0
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.mcore.state_memory import state_bytes
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.dependencies import requirements
from megatron.zerobubble.plan.ir import OpKind, Plan
from megatron.zerobubble.plan.registry import initial_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.profiling.profile import RankProfile, StageSlices
from megatron.zerobubble.profiling.profiler import Profiler
from megatron.zerobubble.profiling.report import report
from tests.support import gpt
from tests.support.gpt import Case, Trainer
from tests.support.memory_ledger import RankLedger, train_watched
from tests.support.ranks import RankPool
from tests.support.sliced import SlicedCase, SlicedTrainer
from tests.support.tolerances import after_steps

pytestmark = [
    pytest.mark.sampled(0.5, group="plans of measured times"),
    pytest.mark.claims(
        "Planning and measuring",
        "re-planned with profiled timings in the middle of a run, with optimistic steps and dropout: not one "
        "bit of the run changes; saved and loaded plans",
        "works",
        also=("training/test_runs.py",),
    ),
    pytest.mark.claims(
        "Long runs",
        "passes of megatron-core's own 1F1B (p 2 and 4) and interleaved 1F1B (p 4) recorded: every pass in the plan's order",
        "works",
        also=("training/test_runs.py",),
    ),
]


ZBV = Case("zbv", 4, 6, num_chunks=2, dropout=0.1, num_steps=4)


@pytest.mark.parametrize(
    ("window", "timed", "ends"),
    [
        (Window(start=3, end=5), [3, 4, 5], [5]),
        (Window(start=2, end=3, interval=4), [2, 3, 6, 7, 10, 11], [3, 7, 11]),
        (Window(start=1, end=2, interval=2), list(range(1, 13)), [2, 4, 6, 8, 10, 12]),
    ],
)
def test_windows(window: Window, timed: list[int], ends: list[int]) -> None:
    assert [i for i in range(1, 13) if window.holds(i)] == timed
    assert [i for i in range(1, 13) if window.ends(i)] == ends


LINK_MS = 1.0
"""Long enough that the hand-written schedules are not the best; what a machine's own links take decides nothing here."""


def _typical(rank: int, stages: tuple[int, ...]) -> dict[tuple[int, OpKind], float]:
    """Uneven stages, and clocks that never agree."""
    base = {OpKind.F: 2.0, OpKind.B: 5.0, OpKind.W: 1.0}
    return {(stage, kind): value + 0.3 * stage + 1e-6 * rank for stage in stages for kind, value in base.items()}


def _train(rank: int, case: Case, window: Window | None, slower: float = 1.0) -> dict[str, Any]:
    """Links between ranks 1 and 2 take `slower` times as long as the others."""
    trainer = (SlicedTrainer if isinstance(case, SlicedCase) else Trainer)(case, seed=1234 + 100 * rank)
    schedule = trainer.schedule
    handwritten = schedule.plan(case.num_microbatches)
    options = SearchOptions(budget=0.2 * Effort.FAST.budget)
    found: list[Any] = []
    replanner = (
        None
        if window is None
        else Replanner(schedule, window, options, num_microbatches=case.num_microbatches, on_plan=found.append)
    )
    stages = case.spec.placement.rank_to_stages[rank]
    losses = []
    measured = RankProfile(times_ms=_typical(rank, stages), memory={})
    link_times = schedule.link_times
    with (
        mock.patch.object(Profiler, "profile", return_value=measured),
        mock.patch.object(
            schedule,
            "link_times",
            side_effect=lambda: {pair: LinkTime(LINK_MS * (slower if set(pair) == {1, 2} else 1.0)) for pair in link_times()},
        ),
    ):
        for iteration in range(1, case.num_steps + 1):
            if replanner is not None:
                replanner.before(iteration, case.num_microbatches)
            trainer.zero_gradients()
            losses.append(trainer.forward_backward(iteration))
            with trainer.host.on_host():
                trainer.optimizer.step()
            if replanner is not None and replanner.is_due(iteration):
                replanner.after(iteration, case.num_microbatches)
    now = schedule.plan(case.num_microbatches)
    result = {
        "losses": losses,
        "weights": trainer.snapshot(),
        "plan": now.to_json(),
        "found": len(found),
        "evaluation": _evaluate(trainer),
        "links": None if replanner is None or replanner.costs is None else replanner.costs.links,
        "times": None if replanner is None or replanner.costs is None else _gain(handwritten, now, replanner),
    }
    trainer.close()
    return result


def _evaluate(trainer: Trainer) -> list[float]:
    for chunk in trainer.chunks:
        chunk.eval()
    return trainer.forward_backward(0, forward_only=True)


def _gain(handwritten: Any, now: Any, replanner: Replanner) -> tuple[float, float]:
    assert replanner.costs is not None
    options = replanner._options
    before, after = simulate(handwritten, replanner.costs), simulate(now, replanner.costs)
    return options.objective.of(before), options.objective.of(after)


def test_training_results_do_not_change(four_ranks: RankPool) -> None:
    """With dropout, under V: another order of a rank's forwards uses the same dropout masks."""
    before = four_ranks.run(_train, ZBV, None)
    after = four_ranks.run(_train, ZBV, Window(start=1, end=2))
    assert len({result["plan"] for result in after}) == 1, "every rank runs the same plan"
    assert after[0]["plan"] != before[0]["plan"]
    slow, fast = after[0]["times"]
    assert fast < slow
    assert [result["found"] for result in after] == [1, 0, 0, 0]
    for old, new in zip(before, after, strict=True):
        assert new["losses"] == old["losses"]
        assert new["evaluation"] == old["evaluation"]
        assert all(torch.equal(new["weights"][name], weight) for name, weight in old["weights"].items())


def test_links_of_unequal_speed_are_planned_for(four_ranks: RankPool) -> None:
    """The matrix is measured; the losses stay, and so does the order of the data."""
    before = four_ranks.run(_train, replace(ZBV, num_steps=2), None)
    after = four_ranks.run(_train, replace(ZBV, num_steps=2), Window(start=1, end=1), 5.0)
    assert len({result["plan"] for result in after}) == 1
    plan, links = Plan.from_json(after[0]["plan"]), after[0]["links"]
    assert plan.assignment == ()
    assert (links.latency_ms[1][2], links.latency_ms[0][1]) == (5.0, 1.0)
    slow, fast = after[0]["times"]
    assert fast < slow
    for old, new in zip(before, after, strict=True):
        assert new["losses"] == old["losses"]


@pytest.mark.parametrize("slower", [1.0, 5.0], ids=["equal links", "a slow link"])
def test_slices_are_planned_again(four_ranks: RankPool, slower: float) -> None:
    case = SlicedCase("zbv", 4, 6, num_chunks=2, num_steps=2, num_slices=2)
    before = four_ranks.run(_train, case, None)
    after = four_ranks.run(_train, case, Window(start=1, end=1), slower)
    assert len({result["plan"] for result in after}) == 1
    plan = Plan.from_json(after[0]["plan"])
    assert (plan.num_slices, plan.assignment) == (2, ())
    slow, fast = after[0]["times"]
    assert fast < slow if slower == 1 else fast <= slow, "searches with slices take links for equal"
    for old, new in zip(before, after, strict=True):
        assert new["losses"] == old["losses"]
        assert all(torch.equal(new["weights"][name], weight) for name, weight in old["weights"].items())


def _choose_slices(rank: int, case: SlicedCase, constant_ms: float) -> tuple[list[Any], int, tuple[int, ...]]:
    """Each pass takes `constant_ms` besides its tokens."""
    trainer = SlicedTrainer(case, seed=1234 + 100 * rank)
    schedule = trainer.schedule
    schedule.slicing = SliceOptions(is_measured=True)
    replanner = Replanner(
        schedule,
        Window(start=1, end=1),
        SearchOptions(budget=0.1 * Effort.FAST.budget),
        num_microbatches=case.num_microbatches,
        chooses_slices=True,
    )
    losses = []
    for iteration in range(1, case.num_steps + 1):
        replanner.before(iteration, case.num_microbatches)
        trainer.zero_gradients()
        losses.append(trainer.forward_backward(iteration))
        with trainer.host.on_host():
            trainer.optimizer.step()
        if replanner.is_due(iteration):
            times = {kind: tuple(constant_ms + 0.1 * each for each in schedule.slice_lengths) for kind in (OpKind.F, OpKind.B)}
            stages = case.spec.placement.rank_to_stages[rank]
            slices = {stage: StageSlices(times_ms=times) for stage in stages}
            whole = {(stage, kind): sum(row) for stage in stages for kind, row in times.items()}
            profile = RankProfile(times_ms=whole, memory={}, slices=slices)
            with (
                mock.patch.object(Profiler, "profile", return_value=profile),
                mock.patch.object(schedule, "link_times", return_value={}),  # free, and not as busy as this machine is
            ):
                replanner.after(iteration, case.num_microbatches)
    chosen = schedule.spec.num_slices, schedule.slice_lengths
    trainer.close()
    return losses, *chosen


@pytest.mark.parametrize(("constant_ms", "expected"), [(0.0, (2, 4, 8)), (50.0, (1,))], ids=["free passes", "dear passes"])
def test_the_number_of_slices_is_chosen_by_measured_times(
    four_ranks: RankPool, constant_ms: float, expected: tuple[int, ...]
) -> None:
    """Also that there may be one slice afterwards. The sums of gradients are in another order."""
    case = SlicedCase("zb", 4, 4, num_steps=3, num_slices=4)
    whole = [result["losses"] for result in four_ranks.run(_train, replace(case, num_slices=2), None)]
    for (losses, num_slices, lengths), others in zip(four_ranks.run(_choose_slices, case, constant_ms), whole, strict=True):
        assert num_slices in expected
        assert len(lengths) == num_slices
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(others), rtol=after_steps(3, lr=1e-2), atol=0)


def test_a_hand_written_schedule_is_refined_within_its_memory(four_ranks: RankPool) -> None:
    """ZB-H1 is where ZB with 1F1B's memory begins."""
    case = replace(ZBV, schedule="zb-h1", num_chunks=1, num_steps=2, dropout=0.0)
    for result in four_ranks.run(_train, case, Window(start=1, end=1)):
        slow, fast = result["times"]
        assert fast < slow
        plan = Plan.from_json(result["plan"])
        assert plan.schedule == "zb"
        assert max(peak_memory(plan, CostModel.uniform(plan.placement))) <= 1.0


def _train_within(rank: int, case: Case) -> dict[str, Any]:
    """Rank 0 has headroom for three microbatches, the others for five; measured, not pretended."""
    trainer = Trainer(case)
    trainer.schedule.replan(partial(initial_plan, replace(case.spec, memory_limit=1 / case.num_ranks)))

    headrooms: list[int] = []

    def headroom_bytes(profile: RankProfile) -> int:
        headrooms.append(int((3 if rank == 0 else 5) * sum(held.activation for held in profile.memory.values())))
        return headrooms[-1]

    replanner = Replanner(
        trainer.schedule,
        Window(start=2, end=3),
        SearchOptions(budget=0.2 * Effort.FAST.budget),
        num_microbatches=case.num_microbatches,
        headroom_bytes=headroom_bytes,
        state_bytes=lambda: 7,
    )
    for iteration in range(1, 4):
        replanner.before(iteration, case.num_microbatches)
        trainer.zero_gradients()
        trainer.forward_backward(iteration)
    frugal = trainer.schedule.plan(case.num_microbatches)
    replanner.after(3, case.num_microbatches)
    profiler = trainer.schedule.hooks.profiler = Profiler(torch.device("cpu"))
    trainer.forward_backward(4)
    plan, costs = trainer.schedule.plan(case.num_microbatches), replanner.costs
    assert costs is not None
    with trainer.host.on_host():
        trainer.optimizer.step()
    result = {
        "faster": simulate(plan, costs).span_ms < simulate(frugal, costs).span_ms,
        "held": profiler.profile().peak_bytes / headrooms[0],
        "memory": replanner.memory,
        "state": state_bytes(trainer.chunks, trainer.optimizer),
        "parameters": sum(parameter.nbytes for chunk in trainer.chunks for parameter in chunk.parameters()),
    }
    trainer.close()
    return result


def test_every_rank_keeps_within_its_own_headroom(four_ranks: RankPool) -> None:
    results = four_ranks.run(_train_within, replace(ZBV, num_microbatches=8, dropout=0.0))
    for result in results:
        assert result["held"] <= 1.1, "random states count, too, which are a part of a microbatch of this small model"
        assert result["faster"]
        assert 4 * result["parameters"] <= result["state"] < 4.1 * result["parameters"], "weights, gradients, Adam's two moments"
        for rank in result["memory"]:
            assert rank.predicted_bytes == pytest.approx(rank.measured_bytes, rel=0.1)
            assert rank.state_bytes == 7
            assert rank.workspace_bytes > 0
    assert max(result["held"] for result in results) > 0.7, "and uses it"


def _record(rank: int, case: Case) -> tuple[list[Timeline], float]:
    trainer = Trainer(case)
    trainer.schedule.recordings.choose([1, 2])
    trainer.train()
    timelines = trainer.schedule.timelines()
    offset_ms = trainer.schedule._clock_offset_ms()
    trainer.close()
    return timelines, offset_ms


STOCK = [Case("stock", 4, 6, num_steps=3), Case("stock", 4, 4, num_chunks=2, num_steps=3)]


@pytest.mark.parametrize("case", STOCK, ids=["1f1b", "interleaved"])
def test_passes_of_megatron_cores_own_schedules(four_ranks: RankPool, case: Case) -> None:
    """Every pass once, in the order of the plan, and none before the pass that it needs. Timers that were there stay."""
    results = four_ranks.run(_record, case)
    timelines, _ = results[0]
    assert [offset_ms for _, offset_ms in results] == [0.0] * 4
    assert all(others == timelines for others, _ in results)
    assert [timeline.iteration for timeline in timelines] == [1, 2]
    for timeline in timelines:
        plan = timeline.plan
        assert plan.schedule == ("1f1b" if case.num_chunks == 1 else "interleaved-1f1b")
        assert [[timed.op for timed in row] for row in timeline.rows] == [list(row) for row in plan.ops]
        ends = {timed.op: timed.end_ms for row in timeline.rows for timed in row}
        for row in timeline.rows:
            for timed in row:
                needs = [need for need in requirements(timed.op, plan.num_stages) if need in ends]
                assert all(ends[need] <= timed.end_ms for need in needs)
        seen = report(timeline)
        assert 0.0 < seen.bubble_rate < 1.0
        assert seen.wgrad_share == 0.0
    json.loads(render_trace(timelines))


LEDGER_CASE = Case("zbv", 4, 5, num_chunks=2, num_layers=8)


@pytest.mark.claims(
    "Planning and measuring",
    "memory per rank over many iterations: nothing grows, the peak of activation memory is within 5 % of the plan's",
    "works, live tensors on the CPU",
)
def test_nothing_grows_and_the_plan_knows_the_peak(four_ranks: RankPool) -> None:
    for rank, found in enumerate(four_ranks.run(train_watched, LEDGER_CASE, 3, 1)):
        assert found.complaints() == [], rank
        assert found.predicted > 0
        assert len({each.allocated for each in found.held}) == 1, "after every iteration the same is left"


SLICED_LEDGERS = [
    SlicedCase("zbv", 4, 5, num_chunks=2, num_layers=8, num_slices=4),
    SlicedCase("zb-h1", 4, 6, num_layers=8, num_slices=4, llama=True),
    SlicedCase("1f1b", 4, 5, num_slices=2, recompute="full"),
]


def _train_sliced(rank: int, case: SlicedCase) -> RankLedger:
    with mock.patch.object(gpt, "SEQUENCE", 64):
        return train_watched(rank, case, 3, 1)


@pytest.mark.claims(
    "Planning and measuring",
    "slices of microbatches: the peak of activation memory, with keys, values and their gradients, is within 5 % of the plan's",
    "works, live tensors on the CPU",
)
@pytest.mark.parametrize("case", SLICED_LEDGERS, ids=str)
@pytest.mark.sampled(0.2)
def test_the_plan_knows_the_peak_with_slices(four_ranks: RankPool, case: SlicedCase) -> None:
    for rank, found in enumerate(four_ranks.run(_train_sliced, case)):
        assert found.complaints() == [], rank


def _refused(rank: int) -> str:
    def search() -> None:
        raise PlanError(f"no plan on rank {rank}")

    with pytest.raises(PlanError) as caught:
        _of_rank_0(search)
    return str(caught.value)


def test_what_rank_0_cannot_plan_is_an_error_on_all_ranks(two_ranks: RankPool) -> None:
    assert two_ranks.run(_refused) == ["no plan on rank 0"] * 2
