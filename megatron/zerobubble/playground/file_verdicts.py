"""One sentence about an opened file: what it took, what its plan takes, what 1F1B would take, and which rank has most work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from megatron.zerobubble.errors import UserError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan, placement_of
from megatron.zerobubble.plan.simulate import simulate

_UNEVEN = 1.2
"""How many times the least work of a rank the most is, from which it is mentioned."""


def verdict(
    costs: CostModel,
    placement: Placement | None,
    num_ranks: int,
    num_microbatches: int,
    *,
    run_ms: float | None = None,
    plan_ms: float | None = None,
) -> str:
    """The sentence. Times are makespans, iteration times with the synchronous optimizer.

    Args:
        costs: of the file.
        placement: of its stages; None: it is not known.
        num_ranks: p.
        num_microbatches: m.
        run_ms: what a run took.
        plan_ms: what its plan takes with these costs.
    """
    parts = [
        f"your run took {run_ms:,.0f} ms" if run_ms is not None else "",
        f"the plan takes {plan_ms:,.0f} ms" if plan_ms else "",
    ]
    with suppress(UserError):  # costs that those of p stages cannot be derived from
        plan = build_plan("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
        parts.append(f"1F1B would take {simulate(plan, costs.plain.merged(num_ranks)).makespan_ms:,.0f} ms")
    if placement is not None:
        parts.append(imbalance(costs, placement))
    return "; ".join(filter(None, parts))


def imbalance(costs: CostModel, placement: Placement) -> str:
    """The rank with the most work, if another one has clearly less."""
    work = [
        math.fsum(costs.forward_ms[stage] + costs.backward_ms[stage] + costs.wgrad_ms[stage] for stage in stages)
        for stages in placement.rank_to_stages
    ]
    most, least = work.index(max(work)), work.index(min(work))
    if work[most] <= _UNEVEN * work[least]:
        return ""
    times = f"{work[most] / work[least]:.1f} times" if work[least] else "work, and none is"
    return f"rank {most} has {times} rank {least}'s work: balance the stages"


def placement_named(schedule: object, num_stages: int, num_ranks: int) -> Placement | None:
    """The placement of a file's stages by the name of its schedule; None if they are not those of that schedule."""
    if num_stages == num_ranks:
        return Placement.linear(num_ranks)
    with suppress(UserError):
        for chunks in (None, num_stages // num_ranks):
            placement = placement_of(str(schedule), num_ranks=num_ranks, num_chunks=chunks)
            if placement.num_stages == num_stages:
                return placement
    return None


def contenders(rows: object) -> str:
    """What the contenders of a bench.json took."""
    if not isinstance(rows, Sequence):
        return ""
    named = [(row.get("name"), row.get("ms")) for row in rows[:6] if isinstance(row, dict)]
    times = [(name, ms.get("value")) for name, ms in named if isinstance(name, str) and isinstance(ms, dict)]
    return ", ".join(
        f"{name[:40]} {value:,.0f} ms" for name, value in times if isinstance(value, (int, float)) and math.isfinite(value)
    )
