"""The exact optimum of a small instance, by constraint programming (OR-tools CP-SAT). For tests only.

Times must be whole numbers. Memory is counted as in `simulate`: a stage's activation from the start of F to the end of B, and
what stays from then to the end of W.
"""

import math
from typing import Any

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import OpKind, Placement

_SCALE = 8
"""Memory of a problem times this must be whole."""


def optimum(
    placement: Placement,
    m: int,
    costs: CostModel,
    limit: float,
    *,
    makespan: bool,
    at_most: float = math.inf,
    seconds: float = 60,
) -> float | None:
    """The shortest span or makespan of any plan within the limit; None if it takes longer to find.

    Args:
        placement: stage -> rank.
        m: number of microbatches.
        costs: whole times; memory in eighths.
        limit: most activation memory per rank; 1.0 is 1F1B's rank 0.
        makespan: minimize the makespan instead of the span.
        at_most: the time of a plan that is known, which shortens the proof.
        seconds: how long to look.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = 2 * int(m * sum(map(sum, (costs.forward_ms, costs.backward_ms, costs.wgrad_ms))) + 4 * placement.num_stages)
    starts: dict[tuple[int, OpKind, int], Any] = {}
    ends: dict[tuple[int, OpKind, int], Any] = {}
    rows: list[list[Any]] = [[] for _ in range(placement.num_ranks)]
    held: list[list[tuple[Any, int]]] = [[] for _ in range(placement.num_ranks)]
    for stage, rank in enumerate(placement.stage_to_rank):
        for mb in range(m):
            for kind in (OpKind.F, OpKind.B, OpKind.W):
                length = int(costs.duration_ms(stage, kind))
                start = starts[stage, kind, mb] = model.new_int_var(0, horizon, "")
                ends[stage, kind, mb] = start + length
                rows[rank].append(model.new_fixed_size_interval_var(start, length, ""))
                if mb:
                    model.add(start >= ends[stage, kind, mb - 1])
            for first, last, part in (
                (starts[stage, OpKind.F, mb], ends[stage, OpKind.B, mb], costs.activation[stage]),
                (ends[stage, OpKind.B, mb], ends[stage, OpKind.W, mb], costs.activation_after_backward[stage]),
            ):
                size = model.new_int_var(0, horizon, "")
                held[rank].append((model.new_interval_var(first, size, last, ""), int(part * _SCALE)))
    for stage, rank in enumerate(placement.stage_to_rank):
        for mb in range(m):
            model.add(starts[stage, OpKind.B, mb] >= ends[stage, OpKind.F, mb])
            model.add(starts[stage, OpKind.W, mb] >= ends[stage, OpKind.B, mb])
            if stage + 1 < placement.num_stages:
                link = int(costs.comm_ms) if placement.stage_to_rank[stage + 1] != rank else 0
                model.add(starts[stage + 1, OpKind.F, mb] >= ends[stage, OpKind.F, mb] + link)
                model.add(starts[stage, OpKind.B, mb] >= ends[stage + 1, OpKind.B, mb] + link)
    capacity = math.floor(limit * min(placement.num_ranks, m) * _SCALE + 1e-6)
    objective = model.new_int_var(0, horizon, "")
    for rank, stages in enumerate(placement.rank_to_stages):
        model.add_no_overlap(rows[rank])
        model.add_cumulative([interval for interval, _ in held[rank]], [part for _, part in held[rank]], capacity)
        begin = 0 if makespan else starts[stages[0], OpKind.F, 0]
        for stage in stages:
            model.add(objective >= ends[stage, OpKind.W, m - 1] - begin)
    if makespan:
        model.add(starts[0, OpKind.F, 0] == 0)
    if at_most < math.inf:
        model.add(objective <= math.floor(at_most + 1e-6))
    model.minimize(objective)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    return float(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
