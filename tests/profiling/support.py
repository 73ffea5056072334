"""Recordings made by hand."""

from __future__ import annotations

from megatron.zerobubble.plan.communication import Message, Program, place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.timeline import Activity, RankTimeline, Span, Timeline


def span(activity: Activity, start_ms: float, end_ms: float, message: Message | None = None) -> Span:
    return Span(activity=activity, start_ms=start_ms, end_ms=end_ms, message=message)


def as_recorded(name: str, p: int, m: int, *, comm_ms: float = 0.25, iteration: int = 7) -> Timeline:
    """`run_as_simulated` of a hand-written schedule, F=B=W=1 per rank."""
    plan = build_plan(name, num_ranks=p, num_microbatches=m)
    return run_as_simulated(plan, CostModel.uniform(plan.placement, comm_ms=comm_ms), iteration=iteration)


def run_as_simulated(plan: Plan, costs: CostModel, *, iteration: int = 7) -> Timeline:
    """What a recorder would see of a simulated run: sends from the end of their op, receives posted when the op before ends,
    waits until the message is there, and an optimizer of 2 ms behind the last op."""
    program: Program = place_communication(plan)
    simulation = simulate(plan, costs)
    sent = {
        message: timed.end_ms
        for steps, row in zip(program.steps, simulation.rows, strict=True)
        for step, timed in zip(steps, row, strict=True)
        for message in step.send
    }
    ranks = []
    for steps, row in zip(program.steps, simulation.rows, strict=True):
        free, spans = 0.0, []
        for step, timed in zip(steps, row, strict=True):
            for message in step.take:
                arrived = max(free, sent[message] + costs.link_ms(message.source, message.target))
                spans.append(span(Activity.WAIT, free, arrived, message))
                spans.append(span(Activity.RECEIVE, free, arrived, message))
            spans += [span(Activity.SEND, timed.end_ms, timed.end_ms + 2.0, message) for message in step.send]
            free = timed.end_ms
        spans.append(span(Activity.OPTIMIZER, free, free + 2.0))
        ranks.append(RankTimeline(ops=row, spans=tuple(spans)))
    return Timeline(iteration=iteration, plan=plan, ranks=tuple(ranks))
