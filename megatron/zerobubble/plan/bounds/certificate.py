"""Certificates: a plan with proof of how far from the best possible it can be, for a checker that does not trust the planner.

`megatron.zerobubble.verify` is that checker. It shares no code with this one; the file it reads is all they have in common:

    format          zerobubble-certificate/1
    plan            the plan's JSON form, with its costs
    memory_limit    most activation memory per rank, 1.0 being 1F1B's rank 0; null: no limit
    objective       span or makespan
    objective_ms    what the plan takes
    bound           the lower bound on what any plan of this placement takes within the limit: name, rank, bound_ms, terms_ms,
                    and prices

The *prices* make the bound checkable without a search. Parts of a bound are small linear programs: the most time that F can take
within the memory, the most that B and W can be left after the last F. By weak duality any price of memory, in milliseconds per
microbatch, bounds such a program, and the right one is exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from megatron.zerobubble.plan.bounds.instance import Items
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.microbatch_costs import COST_LISTS
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.simulate import Simulation

FORMAT = "zerobubble-certificate/1"

_Item = tuple[float, float]
"""Milliseconds, and memory in microbatches."""


def certificate(simulation: Simulation, objective: Objective, memory_limit: float | None) -> dict[str, Any]:
    """The certificate of a simulated plan.

    Args:
        simulation: the plan under its costs.
        objective: the iteration time that it is to be near the best of.
        memory_limit: the limit it was made for; None: its own peak memory, so that the bound is over all plans that need no more.
    """
    plan, costs = simulation.plan, simulation.costs
    limit = max(simulation.peak_memory) if memory_limit is None else memory_limit
    bound = lower_bound(plan.placement, plan.num_microbatches, costs, limit)
    found = bound.derivation if objective is Objective.SPAN else bound.makespan_derivation
    assert found is not None, "lower_bound derives its bounds"
    rank = found.ranks[-1] if found.ranks else 0
    unit = min(plan.num_ranks, plan.num_microbatches)
    return {
        "format": FORMAT,
        "plan": json.loads(plan.to_json(costs=costs.to_json())),
        "memory_limit": None if math.isinf(limit) else limit,
        "objective": objective.value,
        "objective_ms": objective.of(simulation),
        "bound": {
            "name": found.name,
            "rank": rank,
            "bound_ms": found.value_ms,
            "terms_ms": dict(found.terms),
            "prices": _prices(costs, plan.placement.rank_to_stages[rank], plan.num_microbatches, limit * unit),
        },
    }


def _prices(costs: CostModel, stages: Iterable[int], num_microbatches: int, limit: float) -> dict[str, float]:
    """The price of memory in each of the linear programs about one rank, by the name under which the checker reads it."""
    items = [
        tuple(getattr(of_part, name)[stage] for name in COST_LISTS)
        for of_part, count in Items(costs, num_microbatches).parts
        for stage in stages
        for _ in range(count)
    ]
    return {
        "before the first B": _marginal([(f, whole) for f, _, _, whole, _ in items], limit),
        "after the last F": _marginal([part for _, *costs in items for part in _left(*costs)], limit),
        "after the last B": _marginal([(w, min(whole, after)) for _, _, w, whole, after in items], limit),
    }


def _left(backward: float, wgrad: float, whole: float, after: float) -> list[_Item]:
    """What a pass can leave after the last F: W, and B as well, by the milliseconds and the memory that it adds."""
    if backward * after <= wgrad * (whole - after):
        return [(wgrad, after), (backward, whole - after)]
    return [(backward + wgrad, whole)]


def _marginal(items: Iterable[_Item], memory: float) -> float:
    """The price of the item that is only taken in part, if as much time as possible is to fit the memory; 0 if all fit."""
    for price, size in sorted(((time / size, size) for time, size in items if size > 0), reverse=True):
        memory -= size
        if memory < 0:
            return price
    return 0.0
