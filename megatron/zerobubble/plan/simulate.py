"""Plan x CostModel -> when every op runs, the iteration time, the bubble rate and the peak activation memory.

Execution is in order: an op starts when its rank is free and its inputs (`dependencies.requirements`) are computed, plus
`comm_ms` if they come from another rank. Sends and receives take no time on the ranks. Definitions:

- span: max over ranks of (end of the rank's last op - start of its first): the iteration time with post-validation, when the
  optimizer needs no global synchronization (arXiv 2401.10241, section 4);
- makespan: last end - first start over all ranks: the iteration time with the synchronous optimizer;
- bubble rate: (span - work) / span, with the work m*(F+B+W) of the bottleneck rank (section 5.3);
- peak memory: per rank, in units of the activation memory of 1F1B's rank 0, which is min(p, m) microbatches of one rank's share
  of the layers. F adds a stage's `activation`, B leaves `activation_after_backward`, and W or BW frees the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.dependencies import execution_order, requirements, result_of
from megatron.zerobubble.plan.ir import Op, OpKind, Plan


class TimedOp(NamedTuple):
    """An op with its start and end, simulated or recorded, in milliseconds on one clock for all ranks."""

    op: Op
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Simulation:
    """A plan's timing and memory under given costs."""

    plan: Plan
    costs: CostModel
    rows: tuple[tuple[TimedOp, ...], ...]
    """Per rank its ops with their times, in plan order."""
    span_ms: float
    """Iteration time with post-validation: the longest any rank takes from its first to its last op."""
    makespan_ms: float
    """Iteration time with the synchronous optimizer: from the first start to the last end over all ranks."""
    bubble_rate: float
    """Idle share of the span on the bottleneck rank, 0..1."""
    peak_memory: tuple[float, ...]
    """Peak activation memory per rank; 1.0 is 1F1B's rank 0."""

    def metrics(self) -> dict[str, Any]:
        """The `metrics` object of the plan's JSON form."""
        return {
            "span_ms": self.span_ms,
            "makespan_ms": self.makespan_ms,
            "bubble_rate": self.bubble_rate,
            "peak_memory": list(self.peak_memory),
        }


def simulate(plan: Plan, costs: CostModel) -> Simulation:
    """Simulate a validated plan under `costs`. Linear in the number of ops.

    Raises:
        PlanError: the costs are for another number of stages.
        DeadlockError: the ranks wait for each other forever.
    """
    costs.check_fits(plan.placement)
    durations = {(stage, kind): costs.duration_ms(stage, kind) for stage in range(plan.num_stages) for kind in OpKind}
    rows = run_in_order(plan, lambda op: durations[op.stage, op.kind], costs.comm_ms)
    busy = [math.fsum(durations[op.stage, op.kind] for op in row) for row in plan.ops]
    filled = [row for row in rows if row]
    span = span_of(rows)
    first, last = (
        min((row[0].start_ms for row in filled), default=0.0),
        max((row[-1].end_ms for row in filled), default=0.0),
    )
    return Simulation(
        plan=plan,
        costs=costs,
        rows=rows,
        span_ms=span,
        makespan_ms=last - first,
        bubble_rate=max(0.0, span - max(busy)) / span if span > 0 else 0.0,
        peak_memory=peak_memory(plan, costs),
    )


def run_in_order(plan: Plan, duration_ms: Callable[[Op], float], comm_ms: float) -> tuple[tuple[TimedOp, ...], ...]:
    """Per rank its ops, each as early as it can run in plan order. Linear in the number of ops.

    Args:
        plan: a validated plan.
        duration_ms: op -> its duration.
        comm_ms: P2P latency, added if an op needs another rank's result.

    Raises:
        DeadlockError: the ranks wait for each other forever.
    """
    rows: list[list[TimedOp]] = [[] for _ in plan.ops]
    produced: dict[Op, tuple[float, int]] = {}
    for rank, step in execution_order(plan):
        op = plan.ops[rank][step]
        start = rows[rank][-1].end_ms if rows[rank] else 0.0
        for need in requirements(op, plan.num_stages):
            ready, producer = produced[need]
            start = max(start, ready if producer == rank else ready + comm_ms)
        end = start + duration_ms(op)
        rows[rank].append(TimedOp(op, start, end))
        produced[result_of(op)] = (end, rank)
    return tuple(map(tuple, rows))


def span_of(rows: Sequence[Sequence[TimedOp]]) -> float:
    """The span: the longest time any rank takes from the start of its first op to the end of its last, in milliseconds."""
    return max((row[-1].end_ms - row[0].start_ms for row in rows if row), default=0.0)


def peak_memory(plan: Plan, costs: CostModel) -> tuple[float, ...]:
    """Peak activation memory per rank; 1.0 is 1F1B's rank 0.

    It does not depend on times: a rank's memory changes only with its own ops. In a forward-only plan each F frees its
    activations at once.
    """
    costs.check_fits(plan.placement)
    unit = min(plan.num_ranks, plan.num_microbatches)
    return tuple(_peak_of_row(row, costs) / unit for row in plan.ops)


def _peak_of_row(row: tuple[Op, ...], costs: CostModel) -> float:
    """Peak of one rank in microbatches. Only F adds memory, and B on a stage with recomputation.

    Counts passes per stage instead of a running float sum, so that a plan exactly at a limit compares equal to it.
    """
    has_backward = any(op.kind is not OpKind.F for op in row)
    stages = sorted({op.stage for op in row})
    before = dict.fromkeys(stages, 0)
    after = dict.fromkeys(stages, 0)
    peak = 0.0
    grows = [costs.activation_after_backward[s] > costs.activation[s] for s in range(costs.num_stages)]
    for stage, kind, _ in row:
        if kind is OpKind.F:
            before[stage] += 1
        elif kind is OpKind.W:
            after[stage] -= 1
        else:
            before[stage] -= 1
            after[stage] += kind is OpKind.B
        if kind is OpKind.F or grows[stage]:
            memory = math.fsum(before[s] * costs.activation[s] + after[s] * costs.activation_after_backward[s] for s in stages)
            peak = max(peak, memory)
        before[stage] -= kind is OpKind.F and not has_backward
    return peak
