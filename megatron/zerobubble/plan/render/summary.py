"""A plan and what it reaches, in lines of text: for `zerobubble plan` and the playground."""

from __future__ import annotations

from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.simulate import Simulation
from megatron.zerobubble.plan.validate import live_microbatches, pending_wgrads


def headline(plan: Plan) -> str:
    """What is planned, in one line."""
    return (
        f"{plan.schedule}: {plan.num_ranks} ranks, {plan.num_microbatches} microbatches, "
        f"{plan.placement.num_chunks} stage(s) a rank ({plan.placement.name})"
    )


def measures(simulation: Simulation) -> str:
    """What it reaches, in one line."""
    return (
        f"bubble {100 * simulation.bubble_rate:.2f} %, span {simulation.span_ms:.3f} ms, "
        f"makespan {simulation.makespan_ms:.3f} ms, peak memory {max(simulation.peak_memory):.4f} of 1F1B's"
    )


def bounds(result: Result) -> str:
    """What no plan can beat, and how far this one is above it, in one line."""
    simulation, bound = result.simulation, result.bound
    return (
        f"lower bounds: bubble {100 * bound.bubble_rate:.2f} %, "
        f"span {bound.span_ms:.3f} ms (gap {100 * bound.gap(simulation.span_ms):.2f} %), "
        f"makespan {bound.makespan_ms:.3f} ms (gap {100 * bound.makespan_gap(simulation.makespan_ms):.2f} %)"
    )


def summary(result: Result, width: int) -> str:
    """The text timeline under its headline, with the measures, the bounds and what each rank holds."""
    simulation = result.simulation
    plan = simulation.plan
    ranks = [
        f"  rank {rank}: peak memory {memory:.4f}, {live} passes held, {pending} W pending at most"
        for rank, (memory, live, pending) in enumerate(
            zip(simulation.peak_memory, live_microbatches(plan), pending_wgrads(plan), strict=True)
        )
    ]
    timeline = render_text(simulation.rows, max_width=width)
    return "\n".join([headline(plan), "", timeline, "", measures(simulation), bounds(result), *ranks])
