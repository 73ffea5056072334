"""Which ops of a plan to launch together, and where its Ws wait: with all-to-alls in F and B, what pays in the simulator.

A pair hides communication of the one op beside computation of the other, and its results come later than those of its F alone.
So an order made for single ops gains little from pairs, and there are orders made for them (`generators.waves`). A W that waits
is computed beside the all-to-alls of single ops, in any order, and needs memory for waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.generators.waves import WAITS, Walk, waves, with_wgrads
from megatron.zerobubble.plan.ir import Launch, OpKind, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE, validate

_PATIENCE = (0.0, 0.25, 0.5, 1.0)
"""Shares of F: how long an F that can run waits for the B behind it, to be a pair with it."""


def with_pairs(plan: Plan, costs: CostModel, objective: Objective, memory_limit: float | None = None) -> Plan:
    """The plan, its order with pairs or later Ws, or a wave on its placement: what takes the least time, of equals the first.

    Args:
        plan: a validated plan.
        costs: times, activation memory and all-to-alls.
        objective: which iteration time to minimize.
        memory_limit: most activation memory per rank; 1.0 is 1F1B's rank 0. None: that of the plan and of one F more, because a
            pair needs the memory of its F before its B frees any.
    """
    if not any(costs.all_to_all):
        return plan
    limit = memory_limit
    if limit is None:
        limit = max(peak_memory(plan, costs)) + max(costs.activation) / min(plan.num_ranks, plan.num_microbatches)
    fits = (other for other in _candidates(plan, costs, limit) if max(peak_memory(other, costs)) <= limit + MEMORY_TOLERANCE)
    best = min((plan, *fits), key=lambda each: objective.of(simulate(each, costs)))
    validate(best)
    return best


def _candidates(plan: Plan, costs: CostModel, limit: float) -> Iterator[Plan]:
    for patience in _PATIENCE:
        yield marked(plan, costs, patience)
    if costs.table.is_alike and not costs.table.has_slices and not plan.assignment and plan.num_slices == 1:
        memory = limit * min(plan.num_ranks, plan.num_microbatches) + MEMORY_TOLERANCE
        splits = any(op.kind is OpKind.W for op in plan.ops[0])
        if costs.wgrad_beside and splits:
            rows = [[(op,) for op in row if op.kind is not OpKind.W] for row in plan.ops]
            for wait in WAITS:
                later = with_wgrads(plan.schedule, plan.placement, plan.num_microbatches, rows, costs, memory, wait=wait)
                yield later
                yield marked(later, costs, 0.0)
        yield from waves(plan.schedule, plan.placement, plan.num_microbatches, costs, memory, splits=splits)


def marked(plan: Plan, costs: CostModel, patience: float) -> Plan:
    """The plan's order with each F and B behind it as a pair whose B ends earlier so than behind that F. Its old pairs go.

    No rank waits forever: of a pair both inputs are known when it is chosen.

    Args:
        plan: a validated plan.
        costs: its costs.
        patience: share of an F for which it waits for the B.
    """
    walk, position, pairs = Walk(plan.placement, costs.of_plan(plan)), [0] * plan.num_ranks, set()
    for rank in walk:
        row, at = plan.ops[rank], position[rank]
        if at == len(row):
            continue
        op, behind = row[at], row[at + 1] if at + 1 < len(row) else None
        start = max(walk.free[rank], walk.arrival(op))
        if start == math.inf:
            continue
        launch: Launch = (op,)
        is_couple = op.kind is OpKind.F and behind is not None and behind.kind in (OpKind.B, OpKind.BW)
        if is_couple and behind is not None and behind.microbatch != op.microbatch:
            arrives, alone = walk.arrival(behind), walk.launch_ms(launch)
            ends = max(start + alone, arrives) + walk.launch_ms((behind,))
            if arrives <= start + patience * alone and max(start, arrives) + walk.launch_ms((op, behind)) < ends:
                launch = op, behind
                pairs.add(op)
        walk.run(rank, launch)
        position[rank] += len(launch)
    return replace(plan, pairs=frozenset(pairs))
