"""A plan and its metrics as lines of text, for `zerobubble plan` and the playground."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zerobubble.plan.bounds.schedule_bound import TimeBound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective, TimesAndBubble
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.render.svg import Panel, render_svg
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.simulate import Simulation
from megatron.zerobubble.plan.validate import live_microbatches, pending_wgrads


def title(schedule: str) -> str:
    """A schedule's name in its paper; any other name as it is."""
    return next((info.title for info in known_schedules() if info.name == schedule), schedule)


def headline(plan: Plan, name: str | None = None) -> str:
    """The plan's schedule, or another name for it, and its sizes, in one line."""
    return (
        f"{name or plan.schedule}: {plan.num_ranks} pipeline ranks (PP), {plan.num_microbatches} microbatches per iteration, "
        f"{plan.placement.num_chunks} stage(s) per rank ({plan.placement.name})"
    ) + (f", {slices_text(plan)}" if plan.num_slices > 1 else "")


def slices_text(plan: Plan) -> str:
    """How many slices a plan's microbatches have."""
    fewest = min(plan.passes.slices)
    return f"{plan.num_slices if fewest == plan.num_slices else f'{fewest} to {plan.num_slices}'} slices per microbatch"


def lengths(simulation: Simulation) -> list[str]:
    """The unequal microbatches, slices and links of a plan, one line each; empty if all are equal."""
    costs, plan, lines = simulation.costs, simulation.plan, []
    if not costs.table.is_alike:
        tokens = [costs.tokens[plan.batch_index(i)] for i in range(plan.num_microbatches)] if costs.tokens else []
        mean = f" (mean {sum(tokens) / len(tokens):.0f})" if tokens else ""
        lines.append(
            f"microbatches of {min(tokens)} to {max(tokens)} tokens{mean}" if tokens else "microbatches of unequal costs"
        )
        lines[-1] += f", idle share {100 * simulation.idle_share:.2f} % of the makespan"
        if plan.assignment:
            lines.append(f"in the order of the data: {_joined(plan.assignment)}")
        if tokens:
            lines.append(f"with tokens: {_joined(tokens)}")
        if plan.slice_counts:
            lines.append(f"in slices: {_joined(plan.slice_counts)}")
    elif costs.table.has_slices and costs.table.tokens:
        lines.append(f"slices of {_joined(costs.table.tokens)} tokens")
    if costs.links is not None:
        times = costs.links.neighbors
        lines.append(f"links of {min(times):.3f} to {max(times):.3f} ms per mean message between neighboring ranks")
    return lines


def slots(plan: Plan, costs: CostModel) -> list[dict[str, int]]:
    """Per slot of the plan its microbatch of the data, and its tokens if they are known; empty if all microbatches are equal."""
    if costs.table.is_alike and not plan.assignment:
        return []
    indices = map(plan.batch_index, range(plan.num_microbatches))
    tokens = costs.tokens
    return [{"data_microbatch": index} | ({"tokens": tokens[index]} if tokens else {}) for index in indices]


def plan_svg(simulation: Simulation, name: str | None = None, *, width_px: int = 1200) -> str:
    """The timeline of a plan as SVG; `name` stands for that of its schedule."""
    subtitle = "; ".join([measures(simulation), *lengths(simulation)[:1]])
    notes = [
        f" (microbatch {slot['data_microbatch']} of the data{f', {tokens} tokens' if (tokens := slot.get('tokens')) else ''})"
        for slot in slots(simulation.plan, simulation.costs)
    ]
    panel = Panel.of_ops(simulation.rows, notes=notes)
    return render_svg([panel], title=headline(simulation.plan, name), subtitle=subtitle, width_px=width_px)


def _joined(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def iteration_times(times: TimesAndBubble) -> str:
    """Both iteration times, each with its bubble: the idle share of that time on the bottleneck rank."""
    return "iteration time " + "; ".join(
        f"{each.of_passes(times):.3f} ms {each.label}, bubble {100 * each.bubble_of(times):.2f} %"
        for each in (Objective.MAKESPAN, Objective.SPAN)
    )


def measures(simulation: Simulation) -> str:
    """Iteration times, bubbles and peak memory, in one line."""
    return f"{iteration_times(simulation)}; peak activation memory {max(simulation.peak_memory):.4f} of 1F1B's"


def all_to_alls(simulation: Simulation) -> list[str]:
    """How much of its all-to-alls a plan hides, as a line; empty if the costs have none."""
    if not any(simulation.costs.all_to_all):
        return []
    exposed, hidden = map(math.fsum, zip(*simulation.communication_ms, strict=True))
    count, num_ranks = len(simulation.plan.pairs), simulation.plan.num_ranks
    early = math.fsum(simulation.early_wgrad_ms) / num_ranks
    return [
        f"all-to-alls of a rank: {exposed / num_ranks:.3f} ms exposed, {hidden / num_ranks:.3f} ms hidden, on average; "
        f"{count} pairs of F and B that run together"
        + (f"; {early:.3f} ms of W computed before their turn, beside single ops" if early else "")
    ]


def step_times(simulation: Simulation) -> list[str]:
    """Both iteration times with what surrounds the passes, as a line; empty if the costs have nothing of that."""
    if simulation.step is None:
        return []
    both = "; ".join(f"{each.of(simulation):.3f} ms {each.label}" for each in (Objective.MAKESPAN, Objective.SPAN))
    return [f"with reductions over replicas, gathering and the optimizer step: {both}"]


def bounds(bound: TimeBound, simulation: Simulation) -> str:
    """Lower bounds and a plan's gaps to them, in one line. A gap is never less than 0 but for rounding."""
    gaps = [max(0.0, 100 * gap) for gap in (bound.makespan_gap(simulation.makespan_ms), bound.gap(simulation.span_ms))]
    return f"makespan {bound.makespan_ms:.3f} ms (gap {gaps[0]:.2f} %), span {bound.span_ms:.3f} ms (gap {gaps[1]:.2f} %)"


def summary(result: Result, width: int, *, is_colored: bool = False) -> str:
    """The headline, the text timeline in `width` columns, the metrics, the lower bounds, and each rank's memory."""
    simulation = result.simulation
    plan = simulation.plan
    ranks = [
        f"  rank {rank}: peak activation memory {memory:.4f}; at most {live} stage activations, {pending} pending W"
        for rank, (memory, live, pending) in enumerate(
            zip(simulation.peak_memory, live_microbatches(plan), pending_wgrads(plan), strict=True)
        )
    ]
    timeline = render_text(simulation.rows, max_width=width, is_colored=is_colored)
    return "\n".join(
        [
            headline(plan),
            "",
            timeline,
            "",
            *lengths(simulation),
            measures(simulation),
            *step_times(simulation),
            *all_to_alls(simulation),
            f"lower bounds: {bounds(result.bound, simulation)}",
            *ranks,
        ]
    )
