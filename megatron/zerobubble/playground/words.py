"""Names and numbers for people: schedules as their papers call them, and three or four significant digits.

The page writes numbers in the same way (`static/js/numbers.js`).
"""

from __future__ import annotations

import math

from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.simulate import Simulation

_DIGITS = 4
_ZERO = 1e-9
"""Smaller values are rounding errors."""


def title(schedule: str) -> str:
    """A schedule's name in its paper; any other name as it is."""
    return next((info.title for info in known_schedules() if info.name == schedule), schedule)


def titled(plan: Plan) -> str:
    """The schedule's name in its paper, with the number of virtual stages where that is a choice."""
    is_choice = plan.placement.name == "loop" and plan.placement.num_chunks > 1
    return f"{title(plan.schedule)}{f' with {plan.placement.num_chunks} virtual stages (VPP) per rank' if is_choice else ''}"


def number(value: float) -> str:
    """Four significant digits; all of a larger whole number."""
    return "0" if abs(value) < _ZERO else f"{value:.{_decimals(value, _DIGITS)}f}"


def milliseconds(value: float) -> str:
    """A time given in milliseconds; from ten seconds on in seconds."""
    return f"{number(value / 1e3)} s" if abs(value) >= 1e4 else f"{number(value)} ms"


def percent(share: float) -> str:
    """A share as a percentage: three significant digits, at most two of them behind the point."""
    value = 100 * share
    return "0 %" if abs(value) < 0.005 else f"{value:.{min(2, _decimals(value, _DIGITS - 1))}f} %"


def _decimals(value: float, digits: int) -> int:
    rounded = float(f"{abs(value):.{digits - 1}e}")  # 9.9999 is written as 10.00
    return max(0, digits - 1 - math.floor(math.log10(rounded)))


def headline(plan: Plan) -> str:
    """The plan's schedule and sizes, in one line."""
    chunks = plan.placement.num_chunks
    stages = "1 stage" if chunks == 1 else f"{chunks} virtual stages (VPP)"
    return (
        f"{title(plan.schedule)}: {plan.num_ranks} pipeline ranks (PP), {plan.num_microbatches} microbatches per iteration, "
        f"{stages} per rank, {plan.placement.name} placement"
    )


def measures(simulation: Simulation) -> str:
    """Bubble rate, iteration times and peak memory, in one line."""
    return (
        f"bubble rate {percent(simulation.bubble_rate)}, iteration time {milliseconds(simulation.makespan_ms)} "
        f"{Objective.MAKESPAN.label}, {milliseconds(simulation.span_ms)} {Objective.SPAN.label}, "
        f"peak activation memory {number(max(simulation.peak_memory))} of 1F1B's"
    )


def lengths(simulation: Simulation, came: Simulation | None = None) -> list[str]:
    """The unequal microbatches and links of a plan, one line each; none if all are equal.

    Args:
        simulation: of the plan.
        came: of the schedule's own order with the data as it came; None: not known.
    """
    costs, lines = simulation.costs, list[str]()
    if costs.is_plain:
        return lines
    every, links = costs.per_microbatch, costs.links
    if every is not None and every.tokens:
        mean = sum(every.tokens) / len(every.tokens)
        lines.append(f"microbatches of {min(every.tokens)} to {max(every.tokens)} tokens (mean {mean:.0f})")
    elif every is not None:
        lines.append("microbatches of unequal costs")
    if links is not None:
        least, most = min(links.neighbors), max(links.neighbors)
        lines.append(f"links of {milliseconds(least)} to {milliseconds(most)} per mean message between neighboring ranks")
    idle = f"idle share {percent(simulation.idle_share)} of the makespan"
    if came is not None:
        idle += f", {percent(came.idle_share)} in the schedule's own order with the data as it came"
    return [*lines, idle]


def verdict(result: Result, objective: Objective) -> str:
    """For `auto`: the chosen schedule, its iteration time, and by how much the runner-up is slower."""
    mine = objective.of(result.simulation)
    chosen = f"auto chose {titled(result.simulation.plan)}: {milliseconds(mine)} per iteration {objective.label}"
    if result.runner_up is None:
        return f"{chosen}; the lower bounds of all others are above it"
    second = objective.of(result.runner_up.simulation)
    return f"{chosen}; runner-up {titled(result.runner_up.simulation.plan)}: {percent(second / mine - 1)} slower"
