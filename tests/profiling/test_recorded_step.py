"""What surrounds the passes, from recordings to the planner: by hand, and on two replicas of two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zerobubble.mcore.replanner import Replanner, Window
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.ir import Op, Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import Simulation, TimedOp, simulate
from megatron.zerobubble.plan.timeline import Activity, Bucket, RankTimeline, Span, Timeline
from megatron.zerobubble.profiling.recorded_step import step_costs
from megatron.zerobubble.profiling.report import report
from tests.support.comparisons import record
from tests.support.gpt import Case, Trainer
from tests.support.plans import plan_of_text
from tests.support.ranks import RankPool

PLAN = plan_of_text("0F0 0BW0\n1F0 1BW0", schedule="1f1b", placement=Placement.linear(2), num_microbatches=1)


def _ops(*times: tuple[str, float, float]) -> tuple[TimedOp, ...]:
    return tuple(TimedOp(Op.parse(word), start, end) for word, start, end in times)


def _spans(*spans: tuple[Activity, float, float, int, int] | tuple[Activity, float, float]) -> tuple[Span, ...]:
    return tuple(
        Span(
            activity=activity,
            start_ms=start,
            end_ms=end,
            bucket=Bucket(stage=own[0], index=own[1], num_bytes=8) if own else None,
        )
        for activity, start, end, *own in spans
    )


def _recorded(*more: Activity, reduced_from: float = 9.0, later_ms: float = 0.0) -> Timeline:
    first = RankTimeline(
        ops=_ops(("0F0", 0, 2), ("0BW0", 10, 14)),
        spans=_spans(
            (Activity.GATHER, -1, 0.5, 0, 1),
            (Activity.GATHER, 0, 1, 0, 0),
            *((activity, 3, 4) for activity in more),
            (Activity.REDUCE, 11 + later_ms, 13 + later_ms, 0, 0),
            (Activity.REDUCE, 12 + later_ms, 16 + later_ms, 0, 1),
            (Activity.GRADIENTS, 14, 16),
            (Activity.GATHER, 20, 21, 0, 1),
            (Activity.OPTIMIZER, 16, 22),
        ),
    )
    last = RankTimeline(
        ops=_ops(("1F0", 2, 4), ("1BW0", 4, 10)),
        spans=_spans((Activity.REDUCE, reduced_from, 20, 1, 0), (Activity.OPTIMIZER, 20, 24)),
    )
    return Timeline(iteration=3, plan=PLAN, ranks=(first, last))


def test_the_costs_of_a_recording_by_hand() -> None:
    """Buckets one after another, a step from when all ranks have their gradients, no gather of the step itself."""
    expected = StepCosts(
        reduce_ms=((2.0, 3.0), (11.0,)), gather_ms=((1.5, 0.5), ()), optimizer_ms=(2.0, 4.0), snapshot_ms=(0.0, 0.0)
    )
    assert step_costs(_recorded()) == expected
    # with post-validation a rank waits for those before it alone
    assert step_costs(_recorded(Activity.VALIDATE)) == replace(expected, optimizer_ms=(6.0, 4.0))
    found = step_costs(_recorded(reduced_from=15.0))
    assert found is not None
    assert (found.reduce_ms[1], found.beside_passes) == ((5.0,), True)  # the last bucket is complete with the last op
    found = step_costs(_recorded(reduced_from=15.0, later_ms=4.0))
    assert found is not None
    assert not found.beside_passes
    assert step_costs(Timeline.planned(simulate(PLAN, CostModel.uniform(PLAN.placement)))) is None


def test_the_median_leaves_out_recordings_with_other_buckets() -> None:
    one = step_costs(_recorded())
    assert one is not None
    others = [replace(one, optimizer_ms=(value, value)) for value in (7.0, 9.0)]
    assert StepCosts.typical([replace(one, reduce_ms=((), (1.0,))), *others, others[1]], max) == others[1]
    assert StepCosts.typical([*others, one], min) == replace(one, optimizer_ms=(2.0, 4.0))


CASE = Case("zb-h1", 2, 4, overlap_grad_reduce=True, num_steps=4, different_data=True)
CASES = [
    CASE,
    replace(CASE, schedule="stock"),
    replace(CASE, schedule="zbv", num_chunks=2, distributed_optimizer=True, overlap_param_gather=True),
    replace(CASE, overlap_grad_reduce=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.5)
def test_what_is_recorded_of_two_replicas_arrives_in_the_prediction(four_ranks: RankPool, case: Case) -> None:
    timelines = four_ranks.run(record, case)
    for timeline in timelines:
        plan, step = timeline.plan, step_costs(timeline)
        assert step is not None
        assert step.beside_passes == case.overlap_grad_reduce
        assert step.has_gathers == case.overlap_param_gather
        assert all(buckets and min(buckets) >= 0.0 and max(buckets) > 0.0 for buckets in step.reduce_ms)
        if case.overlap_grad_reduce and case.schedule != "stock":  # megatron-core splits only the gradients of the first stage
            assert min(map(len, step.reduce_ms)) > 3
        simulation = report(timeline).simulation
        costs = simulation.costs
        assert costs.step == step
        slower = simulate(plan, replace(costs, step=replace(step, optimizer_ms=tuple(1000.0 + ms for ms in step.optimizer_ms))))
        for objective in Objective:
            assert objective.of(simulation) >= objective.of_passes(simulation) + min(step.optimizer_ms)
            assert objective.of(slower) == pytest.approx(objective.of(simulation) + 1000.0)
        without = simulate(plan, replace(costs, step=replace(step, reduce_ms=((),) * plan.num_stages))).step
        assert without is not None
        assert simulation.step is not None
        if not case.overlap_grad_reduce:
            assert simulation.step.makespan_ms > without.makespan_ms


def _step_of_plans(rank: int, case: Case) -> list[StepCosts | None]:
    """What surrounds the passes in the plans that this rank finds; all but the first rank find none."""
    trainer, found = Trainer(case, seed=1234 + rank % 2), list[Simulation]()
    options = SearchOptions(budget=0.05 * Effort.FAST.budget)
    window = Window(start=2, end=4)
    replanner = Replanner(trainer.schedule, window, options, num_microbatches=case.num_microbatches, on_plan=found.append)
    for iteration in range(1, case.num_steps + 1):
        replanner.before(iteration, case.num_microbatches)
        trainer.zero_gradients()
        trainer.forward_backward(iteration)
        with trainer.host.on_host(), trainer.schedule.recorder.span(Activity.OPTIMIZER):
            trainer.optimizer.step()
        if replanner.is_due(iteration):
            replanner.after(iteration, case.num_microbatches)
    trainer.close()
    return [each.costs.step for each in found]


def test_plans_are_chosen_with_the_reductions_and_steps_that_were_recorded(four_ranks: RankPool) -> None:
    """Two replicas; the iteration before the last of the window is recorded, which otherwise none of them is."""
    case = Case("zb", 2, 4, overlap_grad_reduce=True, num_steps=5, max_pending_backward=2)
    (step,) = four_ranks.run(_step_of_plans, case)[0]
    assert step is not None
    assert step.overlaps_reductions
    assert all(len(buckets) > 3 for buckets in step.reduce_ms)
    assert min(step.optimizer_ms) > 0.0
