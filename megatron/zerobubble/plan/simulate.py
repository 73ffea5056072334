"""Plan x CostModel -> when every op runs, the iteration time, the bubble rate and the peak activation memory.

Execution is in order: an op starts when its rank is free and its inputs (`dependencies.requirements`) are computed, plus the
time of the link if they come from another rank. Sends and receives take no time on the ranks. Both ops of a pair start when
their rank is free and the inputs of both are there, and end after the time of both, less what of their all-to-alls is hidden
(`all_to_alls.launch_ms`). A W is shorter by what was computed of it beside earlier all-to-alls (`all_to_alls.Filling`).
Definitions:

- span: max over ranks of (end of the rank's last op - start of its first): the iteration time with post-validation, when the
  optimizer needs no global synchronization (arXiv 2401.10241, section 4);
- makespan: last end - first start over all ranks: the iteration time with the synchronous optimizer;
- bubble rate: (span - work) / span, with the work m*(F+B+W) of the bottleneck rank (section 5.3);
- idle share: (makespan - mean work of a rank) / makespan, over all ranks;
- peak memory: per rank, in units of the activation memory of 1F1B's rank 0, which is min(p, m) microbatches of one rank's share
  of the layers. F adds a stage's `activation`, B leaves `activation_after_backward`, and W or BW frees the rest. With slices each
  does so with its own part, and the microbatch's keys and values are in memory from its first F to its last B, their gradients
  from its first B on.

Costs may have what surrounds the passes (`StepCosts`). Then both iteration times are known with it, too (`Simulation.step`). With
the synchronous optimizer an iteration is from one global gradient norm to the next: a rank steps, gathers parameters, runs its
ops and reduces its last bucket. With post-validation it is the longest time that any rank takes for that and its snapshot.

Costs per microbatch are those of the data: the plan's microbatch i has the costs of `Plan.batch_index(i)`, and a long one counts
in memory for as many short ones as it has tokens.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.zerobubble.plan.costs.all_to_alls import all_to_all_ms, exposed_ms, launch_ms, wgrad_times_ms
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import CostTable
from megatron.zerobubble.plan.costs.step_costs import StepCosts
from megatron.zerobubble.plan.dependencies import execution_order, requirements, result_of
from megatron.zerobubble.plan.ir import Op, OpKind, Plan
from megatron.zerobubble.plan.objective import PassTimes
from megatron.zerobubble.plan.tail import reduced_ms

Stair = tuple[tuple[float, float], ...]
"""A step function as (time in milliseconds, activation memory from then on), in ascending time."""


class TimedOp(NamedTuple):
    """An op with its start and end, simulated or recorded, in milliseconds on one clock for all ranks."""

    op: Op
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class StepTimes:
    """Both iteration times with what surrounds the passes."""

    span_ms: float
    """With post-validation: the longest that any rank takes from its first op to the next iteration, its snapshot included."""
    makespan_ms: float
    """With the synchronous optimizer: from one global gradient norm to the next."""


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
    step: PassTimes | None = None
    """Both iteration times with what surrounds the passes; None: the costs have none."""

    @property
    def idle_share(self) -> float:
        """Share of the makespan, 0..1, in which ranks do not compute, over all ranks."""
        busy = math.fsum(length for row in self.rows for length in lengths_ms(row))
        return max(0.0, 1.0 - busy / (len(self.rows) * self.makespan_ms)) if self.makespan_ms > 0 else 0.0

    @property
    def communication_ms(self) -> tuple[tuple[float, float], ...]:
        """Per rank the time of its all-to-alls: exposed, while it does not compute, and hidden beside the rest of a pair or W."""
        costs, found = self.costs.of_plan(self.plan), []
        for row, early in zip(self.plan.launches, self.early_wgrad_ms, strict=True):
            exposed = math.fsum(exposed_ms(costs, launch) for launch in row) - early
            found.append((exposed, math.fsum(all_to_all_ms(costs, op) for launch in row for op in launch) - exposed))
        return tuple(found)

    @property
    def early_wgrad_ms(self) -> tuple[float, ...]:
        """Per rank how much of its Ws is computed before their turn, beside all-to-alls of single ops, in milliseconds."""
        costs = self.costs.of_plan(self.plan)
        times = wgrad_times_ms(costs, self.plan.launches)
        return tuple(math.fsum(costs.duration_ms(*op) - times[op] for op in row if op in times) for row in self.plan.ops)

    def metrics(self) -> dict[str, Any]:
        """The `metrics` object of the plan's JSON form."""
        around = {} if self.step is None else {f"step_{name}": getattr(self.step, name) for name in ("span_ms", "makespan_ms")}
        if any(self.costs.all_to_all):
            exposed, hidden = zip(*self.communication_ms, strict=True)
            around |= {"exposed_all_to_all_ms": list(exposed), "hidden_all_to_all_ms": list(hidden)}
        return {
            "span_ms": self.span_ms,
            "makespan_ms": self.makespan_ms,
            "bubble_rate": self.bubble_rate,
            "peak_memory": list(self.peak_memory),
        } | around


def read_plan(text: str | bytes) -> tuple[Plan, CostModel | None]:
    """A plan in its JSON form, and the costs it was made for if they are there. Raises PlanError and ConfigError."""
    plan, given = Plan.from_json(text), json.loads(text).get("costs")
    return plan, None if given is None else CostModel.from_json(given)


def simulate(plan: Plan, costs: CostModel) -> Simulation:
    """Simulate a validated plan under `costs`. Linear in the number of ops.

    Raises:
        PlanError: the costs are for another number of stages, ranks or microbatches.
        DeadlockError: the ranks wait for each other forever.
    """
    own = costs.of_plan(plan)
    duration_ms = durations(plan, own)
    rows = run_in_order(plan, duration_ms, own)
    busy = [math.fsum(lengths_ms(row) if plan.pairs else map(duration_ms, ops)) for row, ops in zip(rows, plan.ops, strict=True)]
    filled = [row for row in rows if row]
    span = span_of(rows)
    first, last = (
        min((row[0].start_ms for row in filled), default=0.0),
        max((row[-1].end_ms for row in filled), default=0.0),
    )
    return Simulation(
        plan=plan,
        costs=costs.of_slices(plan),
        rows=rows,
        span_ms=span,
        makespan_ms=last - first,
        bubble_rate=max(0.0, span - max(busy)) / span if span > 0 else 0.0,
        peak_memory=peak_memory(plan, costs),
        step=None if own.step is None else _step_times(rows, plan, duration_ms, own, own.step),
    )


def _step_times(
    rows: Sequence[Sequence[TimedOp]], plan: Plan, duration_ms: Callable[[Op], float], costs: CostModel, step: StepCosts
) -> StepTimes:
    """Both iteration times with what surrounds the passes; `rows` are the passes alone."""
    together = run_in_order(plan, duration_ms, costs, _Gathers(step, dict(enumerate(step.optimizer_ms))))
    alone = run_in_order(plan, duration_ms, costs, _Gathers(step, {})) if step.has_gathers else rows
    each = zip(alone, step.snapshot_ms, step.optimizer_ms, strict=True)
    spans = [math.fsum((reduced_ms(row, step), -row[0].start_ms, *others)) for row, *others in each if row]
    return StepTimes(span_ms=max(spans, default=0.0), makespan_ms=max(reduced_ms(row, step) for row in together))


class _Gathers:
    """When each rank has gathered its parameters.

    Args:
        step: times of the buckets.
        begin_ms: rank -> when it begins to gather, and may run its first op; without it, it begins with that.
    """

    def __init__(self, step: StepCosts, begin_ms: Mapping[int, float]) -> None:
        self.begin_ms = begin_ms
        self._step, self._gathered, self._have_begun = step, dict(begin_ms), set[int]()

    def end_ms(self, rank: int, op: Op, start: float, end: float) -> float:
        """The end of an op that begins at `start` and would end at `end` with all parameters there."""
        if op.kind is not OpKind.F or op.stage in self._have_begun:
            return end
        self._have_begun.add(op.stage)
        buckets, at, last, time = self._step.gather_ms[op.stage], self._gathered.get(rank, start), end, end - start
        whole, before = math.fsum(buckets), 0.0
        for each in buckets:  # the layers from this bucket on run when it is there
            if each > 0:
                at, last, before = at + each, max(last, at + each + time * (1 - before / whole)), before + each
        self._gathered[rank] = at
        return last


def durations(plan: Plan, costs: CostModel) -> Callable[[Op], float]:
    """Op -> its duration, under costs in the plan's own order of microbatches (`CostModel.of_plan`)."""
    wgrads = wgrad_times_ms(costs, plan.launches)
    if wgrads or not costs.table.is_alike:
        return lambda op: wgrads[op] if op in wgrads else costs.duration_ms(*op)
    stages, parts = range(plan.num_stages), range(plan.num_slices)
    times = {(s, kind, part): costs.duration_ms(s, kind, slice=part) for s in stages for kind in OpKind for part in parts}
    return lambda op: times[op.stage, op.kind, op.slice]


def run_in_order(
    plan: Plan, duration_ms: Callable[[Op], float], costs: CostModel | None = None, gathers: _Gathers | None = None
) -> tuple[tuple[TimedOp, ...], ...]:
    """Per rank its ops, each as early as it can run in plan order, those of a pair at once. Linear in the number of ops.

    Args:
        plan: a validated plan.
        duration_ms: op -> its duration.
        costs: have the times of messages between ranks and of pairs, those of the plan (`CostModel.of_plan`); None: messages take
            none, and the ops of a pair run one after the other.
        gathers: when parameters are there; None: from the begin on.

    Raises:
        DeadlockError: the ranks wait for each other forever.
    """
    rows: list[list[TimedOp]] = [[] for _ in plan.ops]
    ready: dict[Op, float] = {}
    """A result -> when the rank that needs it has it."""
    free: dict[tuple[int, int], float] = {}
    """A link -> when it can take the next message."""
    ranks, last = plan.placement.stage_to_rank, plan.num_stages - 1
    for rank, step in execution_order(plan):
        launch = plan.launches[rank][step]
        start = rows[rank][-1].end_ms if rows[rank] else 0.0 if gathers is None else gathers.begin_ms.get(rank, 0.0)
        for op in launch:
            for need in requirements(op, plan.num_stages):
                if need.stage != op.stage:  # else it is the rank's own
                    start = max(start, ready[need])
        together = costs is not None and len(launch) > 1
        end = start + (launch_ms(costs, launch) if together and costs is not None else sum(map(duration_ms, launch)))
        if gathers is not None:
            end = max(gathers.end_ms(rank, op, start, end) for op in launch)
        for op in launch:
            rows[rank].append(TimedOp(op, start, end))
            arrives, to = end, ranks[min(op.stage + 1, last) if op.kind is OpKind.F else max(op.stage - 1, 0)]
            if costs is not None and to != rank and op.kind is not OpKind.W:
                sent = max(end, free.get((rank, to), 0.0))
                free[rank, to] = sent + costs.busy_ms(rank, to, op.microbatch)
                arrives = sent + costs.link_ms(rank, to, op.microbatch)
            ready[result_of(op)] = arrives
    return tuple(map(tuple, rows))


def lengths_ms(row: Sequence[TimedOp]) -> list[float]:
    """Time of each op of a rank in milliseconds: for those of a pair half of the pair's time."""
    lengths = [end - start for _, start, end in row]
    for second in seconds_of_pairs(row):
        pair = row[second - 1 : second + 1]
        lengths[second - 1 : second + 1] = [(max(op.end_ms for op in pair) - pair[0].start_ms) / 2] * 2
    return lengths


def seconds_of_pairs(row: Sequence[TimedOp]) -> set[int]:
    """The places in a rank's row, simulated or recorded, of the second ops of pairs: only they overlap with the op before."""
    return {
        place
        for place, (one, other) in enumerate(itertools.pairwise(row), start=1)
        if min(one.end_ms, other.end_ms) - other.start_ms > min(one.end_ms - one.start_ms, other.end_ms - other.start_ms) / 2
    }


def span_of(rows: Sequence[Sequence[TimedOp]]) -> float:
    """The span: the longest time any rank takes from the start of its first op to the end of its last, in milliseconds."""
    return max((row[-1].end_ms - row[0].start_ms for row in rows if row), default=0.0)


def peak_memory(plan: Plan, costs: CostModel) -> tuple[float, ...]:
    """Peak activation memory per rank; 1.0 is 1F1B's rank 0.

    It does not depend on times: a rank's memory changes only with its own ops. In a forward-only plan each F frees its
    activations at once.
    """
    own = costs.of_plan(plan)
    unit = min(plan.num_ranks, plan.num_microbatches)
    return tuple(max(memory_after_ops(row, own), default=0.0) / unit for row in plan.ops)


def memory_over_time(rows: Sequence[Sequence[TimedOp]], num_microbatches: int, costs: CostModel) -> tuple[Stair, ...]:
    """Activation memory per rank over time, with one step per op in the order of the ops; 1.0 is 1F1B's rank 0.

    Args:
        rows: the timed ops per rank, simulated or recorded, with backward passes.
        num_microbatches: m.
        costs: activation memory per stage; those of the plan (`CostModel.of_plan`).
    """
    unit = min(len(rows), num_microbatches)
    memory = (memory_after_ops([op for op, _, _ in row], costs) for row in rows)
    starts = ([start if op.kind is OpKind.F else end for op, start, end in row] for row in rows)
    return tuple(
        tuple((at, value / unit) for at, value in zip(*stair, strict=True)) for stair in zip(starts, memory, strict=True)
    )


def memory_after_ops(row: Sequence[Op], costs: CostModel) -> list[float]:
    """One rank's activation memory at each of its ops, in microbatches: from the start of an F, from the end of another op.

    Counts passes per stage instead of a running float sum, so that a plan exactly at a limit compares equal to it; for unequal
    microbatches, a running sum. In a row of F alone each frees its activations at once, but not what later slices see.
    """
    has_backward = any(op.kind is not OpKind.F for op in row)
    return _counted_by_stage(row, costs) if costs.table.slices == 1 and has_backward else _summed(row, costs.table, has_backward)


def _counted_by_stage(row: Sequence[Op], costs: CostModel) -> list[float]:
    stages = sorted({op.stage for op in row})
    before, after = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    memory = []
    for stage, kind, *_ in row:
        before[stage] += 1 if kind is OpKind.F else -1 if kind in (OpKind.B, OpKind.BW) else 0
        after[stage] += 1 if kind is OpKind.B else -1 if kind is OpKind.W else 0
        memory.append(math.fsum(before[s] * costs.activation[s] + after[s] * costs.activation_after_backward[s] for s in stages))
    return memory


def _summed(row: Sequence[Op], table: CostTable, has_backward: bool) -> list[float]:
    """By a running sum. Without a backward a pass keeps nothing but keys and values, until the microbatch's last slice."""
    held, memory, is_alike, starts, counts = 0.0, list[float](), table.is_alike, table.starts, table.counts
    for stage, kind, microbatch, index in row:
        own = 0 if is_alike else microbatch
        at, last, keys = starts[own] + index, counts[own] - 1, table.keys[stage][own]
        before, after = table.activation[stage][at], table.activation_after_backward[stage][at]
        if kind is OpKind.F:
            held += before + (keys if index == 0 else 0.0)
        elif kind is OpKind.W:
            held -= after
        else:
            held += (after if kind is OpKind.B else 0.0) - before
            if index == last:
                held += table.key_gradients[stage][own]
            if index == 0:  # with one slice the gradients come and go within the op
                held -= keys + table.key_gradients[stage][own]
        memory.append(max(held, 0.0))
        if not has_backward:
            held -= before + (keys if index == last else 0.0)
    return memory
