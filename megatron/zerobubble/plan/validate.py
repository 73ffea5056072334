"""Checks of every invariant of a plan, linear in the number of its ops.

A plan that passes can be executed: no op is missing or runs twice, and no rank waits forever. The invariants:

1. a rank's row has only ops of its own stages, with microbatches 0..m-1 and the slices that each has;
2. each (stage, microbatch, slice) has exactly one F, and either exactly one BW or exactly one B and one W;
3. F comes before B (or BW), and B before W;
4. ops of one stage and kind run in ascending microbatch order, a BW as a B and as a W; within a microbatch F in ascending order
   of the slices, the others in descending order. The executor relies on it: a link between two stages is then first in, first
   out, and a message needs no tag; each weight adds its microbatches in the same order; and a slice has the keys and values of
   all slices before it, and in B all gradients of its own;
5. no deadlock (`dependencies.execution_order`);
6. no rank exceeds the memory limit, if one is given;
7. a pair is an F and, as the next op of its rank, a B or BW of another microbatch: B of a microbatch always waits for its F.

A violation raises PlanError with the rank x step grid around the offending cell.
"""

from __future__ import annotations

import itertools
from typing import NoReturn

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.dependencies import execution_order, marked_grid
from megatron.zerobubble.plan.ir import Op, OpKind, Plan
from megatron.zerobubble.plan.simulate import memory_after_ops, peak_memory

MEMORY_TOLERANCE = 1e-9
"""Rounding allowed when a peak is compared with a limit."""

_BACKWARD = (OpKind.B, OpKind.BW)
_RELEASES = (OpKind.W, OpKind.BW)


def validate(
    plan: Plan,
    *,
    forward_only: bool = False,
    memory_limit: float | None = None,
    costs: CostModel | None = None,
) -> None:
    """Check every invariant of the module docstring.

    Args:
        plan: the plan.
        forward_only: the plan is for evaluation: every F exactly once and nothing else.
        memory_limit: most activation memory per rank; 1.0 is that of 1F1B's rank 0.
        costs: activation memory per stage; by default uniform stages that keep all activations until W.

    Raises:
        DeadlockError: ranks wait for each other forever.
        PlanError: any other violated invariant.
    """
    steps = _check_rows(plan)
    _check_pairs(plan)
    _check_complete(plan, steps, forward_only=forward_only)
    execution_order(plan)
    if memory_limit is not None:
        _check_memory(plan, costs or CostModel.uniform(plan.placement), memory_limit)


def _fail(plan: Plan, rank: int, step: int, op: Op, problem: str, remedy: str) -> NoReturn:
    raise PlanError(
        f"plan {plan.schedule!r}, rank {rank}, step {step}: {problem} ({op.where}); {remedy}\n{marked_grid(plan, [(rank, step)])}"
    )


def _check_rows(plan: Plan) -> dict[Op, int]:
    """Check invariants 1 and 4, and that no op occurs twice. Returns the step of every op on its rank."""
    steps: dict[Op, int] = {}
    latest: dict[tuple[int, str], Op] = {}
    stage_to_rank, m, passes = plan.placement.stage_to_rank, plan.num_microbatches, plan.passes
    for rank, row in enumerate(plan.ops):
        for step, op in enumerate(row):
            if op.stage >= len(stage_to_rank):
                remedy = f"stages are 0..{plan.num_stages - 1}"
                _fail(plan, rank, step, op, f"{op} has a stage that does not exist", remedy)
            if stage_to_rank[op.stage] != rank:
                owner = stage_to_rank[op.stage]
                _fail(plan, rank, step, op, f"{op} belongs to a stage of rank {owner}", f"move it to rank {owner}")
            if op.microbatch >= m:
                _fail(plan, rank, step, op, f"{op} has a microbatch that does not exist", f"microbatches are 0..{m - 1}")
            if op.slice >= passes.slices[op.microbatch]:
                remedy = f"slices are 0..{passes.slices[op.microbatch] - 1}"
                _fail(plan, rank, step, op, f"{op} has a slice that does not exist", remedy)
            if op in steps:
                _fail(plan, rank, step, op, f"{op} is computed twice, first at step {steps[op]}", "remove one of the two")
            for part in op.kind.value:  # a BW is a B and a W
                earlier = latest.get((op.stage, part), op)
                if passes.number(earlier) > passes.number(op):
                    remedy = (
                        "order microbatches ascending per stage and kind, their slices in F ascending and in B and W descending"
                    )
                    _fail(plan, rank, step, op, f"{op} comes after {earlier}", remedy)
                latest[op.stage, part] = op
            steps[op] = step
    return steps


def _check_pairs(plan: Plan) -> None:
    """Check invariant 7."""
    for rank, row in enumerate(plan.ops if plan.pairs else ()):
        for step, op in enumerate(row):
            behind = row[step + 1] if step + 1 < len(row) else None
            if op not in plan.pairs:
                continue
            is_backward = behind is not None and behind.kind in _BACKWARD and behind.microbatch != op.microbatch
            if op.kind is not OpKind.F or not is_backward:
                problem = f"{op} is in a pair with {behind or 'nothing behind it'}"
                _fail(plan, rank, step, op, problem, "pair an F with a B or BW of another microbatch behind it")
    stray = plan.pairs - {op for row in plan.ops for op in row}
    if stray:
        op = min(stray, key=lambda each: (each.stage, each.microbatch, each.slice))
        raise PlanError(f"plan {plan.schedule!r} has a pair that begins with {op}, which no rank runs; name ops of the plan")


def _check_complete(plan: Plan, steps: dict[Op, int], *, forward_only: bool) -> None:
    """Check invariants 2 and 3."""
    for stage, rank in enumerate(plan.placement.stage_to_rank):
        for number in range(len(plan.passes)):
            forward = plan.passes.nth(stage, OpKind.F, number)
            found = {kind: steps[op] for kind in OpKind if (op := forward._replace(kind=kind)) in steps}
            problem = _problem_of(forward, found, forward_only=forward_only)
            if problem is not None:
                step, op, text, remedy = problem
                _fail(plan, rank, len(plan.ops[rank]) if step is None else step, op, text, remedy)


def _problem_of(forward: Op, found: dict[OpKind, int], *, forward_only: bool) -> tuple[int | None, Op, str, str] | None:
    """The first problem of what an F belongs to: step (None: the row's end), op, problem, remedy; None if it is valid."""
    backward, wgrad, fused = (forward._replace(kind=kind) for kind in (OpKind.B, OpKind.W, OpKind.BW))
    if OpKind.F not in found:
        return None, forward, f"{forward} is missing", f"add {forward}"
    if forward_only:
        extra = next((kind for kind in (*_BACKWARD, OpKind.W) if kind in found), None)
        if extra is None:
            return None
        op = forward._replace(kind=extra)
        return found[extra], op, f"{op} is a backward op in a forward-only plan", "keep only F"
    if OpKind.BW in found:
        extra = next((kind for kind in (OpKind.B, OpKind.W) if kind in found), None)
        if extra is not None:
            op = forward._replace(kind=extra)
            return found[extra], op, f"{op} repeats a part of {fused}", f"use either {fused} or both {backward} and {wgrad}"
    elif OpKind.B not in found:
        remedy = f"add {backward} and {wgrad}, or {fused}; a plan for evaluation is validated with forward_only"
        return None, backward, f"{backward} is missing", remedy
    elif OpKind.W not in found:
        return None, wgrad, f"{wgrad} is missing", f"add {wgrad} after {backward}"
    for before, after in itertools.pairwise(kind for kind in (OpKind.F, OpKind.BW, OpKind.B, OpKind.W) if kind in found):
        if found[after] < found[before]:
            early, late = forward._replace(kind=after), forward._replace(kind=before)
            remedy = f"move it after {late}, which is at step {found[before]}"
            return found[after], early, f"{early} comes before {late}", remedy
    return None


def _check_memory(plan: Plan, costs: CostModel, limit: float) -> None:
    """Check invariant 6."""
    peaks = peak_memory(plan, costs)
    worst = max(range(plan.num_ranks), key=peaks.__getitem__)
    if peaks[worst] <= limit + MEMORY_TOLERANCE:
        return
    memory = memory_after_ops(plan.ops[worst], costs.of_plan(plan))
    step = memory.index(max(memory))
    op = plan.ops[worst][step]
    problem = f"memory peaks at {peaks[worst]:.4f} and the limit is {limit:.4f} (1.0 is 1F1B's rank 0)"
    _fail(plan, worst, step, op, problem, "choose a schedule that needs less activation memory, or raise the limit")


def live_timeline(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Per rank, after each of its ops, the number of (stage, microbatch, slice) between F and W (or BW).

    These are the activations in memory, in whole or the part kept for W. A forward without a backward in the plan does not
    count.
    """
    return tuple(_running(row, enters=(OpKind.F,), leaves=_RELEASES) for row in plan.ops)


def pending_timeline(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Per rank, after each of its ops, the number of (stage, microbatch, slice) between B and W."""
    return tuple(_running(row, enters=(OpKind.B,), leaves=(OpKind.W,)) for row in plan.ops)


def live_microbatches(plan: Plan) -> tuple[int, ...]:
    """Per rank, the peak of `live_timeline`: the most (stage, microbatch, slice) activations in memory at once."""
    return tuple(max(row, default=0) for row in live_timeline(plan))


def pending_wgrads(plan: Plan) -> tuple[int, ...]:
    """Per rank, the peak of `pending_timeline`: the most W pending at once in the weight gradient store."""
    return tuple(max(row, default=0) for row in pending_timeline(plan))


def _running(row: tuple[Op, ...], *, enters: tuple[OpKind, ...], leaves: tuple[OpKind, ...]) -> tuple[int, ...]:
    leaving = {op._replace(kind=OpKind.F) for op in row if op.kind in leaves}
    counts: list[int] = []
    count = 0
    for op in row:
        if op._replace(kind=OpKind.F) in leaving:
            count += (op.kind in enters) - (op.kind in leaves)
        counts.append(count)
    return tuple(counts)
