"""What an op waits for, and an order in which a plan's ops can run.

The dependency rules, once, for the validator, the simulator and whoever else walks a plan (arXiv 2401.10241, section
2):

- F of a stage needs F of the stage before it, of the same microbatch;
- B or BW of a stage needs the input gradient of the stage after it (of BW, that is the end of the whole), and its own
  F;
- W of a stage needs its own B.

Each rank runs its ops in the plan's order, one at a time; a result is there for every later reader once its op has
ended.
"""

from __future__ import annotations

from collections import deque

from megatron.zerobubble.errors import DeadlockError
from megatron.zerobubble.plan.grid import MAX_ROWS, marked_grid
from megatron.zerobubble.plan.ir import Op, OpKind, Plan


def result_of(op: Op) -> Op:
    """What others wait for when they wait for `op`: the op itself, where a BW counts as the B it contains."""
    return Op(op.stage, OpKind.B, op.microbatch) if op.kind is OpKind.BW else op


def requirements(op: Op, num_stages: int) -> tuple[Op, ...]:
    """The results (see `result_of`) that must exist before `op` can start, in a model of `num_stages` stages."""
    stage, kind, microbatch = op
    if kind is OpKind.F:
        return (Op(stage - 1, OpKind.F, microbatch),) if stage > 0 else ()
    if kind is OpKind.W:
        return (Op(stage, OpKind.B, microbatch),)
    own_forward = Op(stage, OpKind.F, microbatch)
    if stage + 1 < num_stages:
        return (Op(stage + 1, OpKind.B, microbatch), own_forward)
    return (own_forward,)


def execution_order(plan: Plan) -> list[tuple[int, int]]:
    """One order over all ranks in which every op runs after what it needs. Linear in the number of ops.

    Returns:
        (rank, step) pairs, every op of the plan once; the same plan always gives the same order.

    Raises:
        DeadlockError: some ranks wait for each other, or for an op that no rank computes.
    """
    position = [0] * plan.num_ranks
    done: set[Op] = set()
    waiting: dict[Op, list[int]] = {}
    order: list[tuple[int, int]] = []
    ready = deque(range(plan.num_ranks))
    while ready:
        rank = ready.popleft()
        row = plan.ops[rank]
        for step in range(position[rank], len(row)):
            missing = next((need for need in requirements(row[step], plan.num_stages) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            order.append((rank, step))
            position[rank] = step + 1
            result = result_of(row[step])
            done.add(result)
            ready.extend(waiting.pop(result, ()))
    if len(order) < sum(map(len, plan.ops)):
        raise DeadlockError(_deadlock_text(plan, position, waiting))
    return order


def _deadlock_text(plan: Plan, position: list[int], waiting: dict[Op, list[int]]) -> str:
    """What every stuck rank waits for, those of one cycle first: they are the cause, the others its followers."""
    awaited = {rank: need for need, ranks in waiting.items() for rank in ranks}
    location = {result_of(op): (rank, step) for rank, row in enumerate(plan.ops) for step, op in enumerate(row)}
    cycle = _cycle(awaited, {rank: location[need][0] for rank, need in awaited.items() if need in location})
    stuck = cycle + sorted(set(awaited) - set(cycle))
    lines = [f"plan {plan.schedule!r} deadlocks: {len(stuck)} of {plan.num_ranks} ranks can never go on"]
    for rank in stuck[:MAX_ROWS]:
        op, need = plan.ops[rank][position[rank]], awaited[rank]
        where = "which rank {} has at step {}".format(*location[need]) if need in location else "which no rank computes"
        lines.append(
            f"  rank {rank} is at step {position[rank]}, {op} (stage {op.stage}, microbatch {op.microbatch}), "
            f"and waits for {need}, {where}"
        )
    if len(stuck) > MAX_ROWS:
        lines.append(f"  ... and {len(stuck) - MAX_ROWS} more ranks")
    lines.append("move what is waited for before the op at which its own rank is stuck:")
    lines.append(marked_grid(plan, [(rank, position[rank]) for rank in stuck]))
    return "\n".join(lines)


def _cycle(awaited: dict[int, Op], blocker: dict[int, int]) -> list[int]:
    """Ranks that wait for one another in a circle; one rank that waits for an op that nobody computes counts as one."""
    path: list[int] = []
    rank = min(awaited)
    while rank not in path:
        path.append(rank)
        if rank not in blocker:
            return [rank]
        rank = blocker[rank]
    return path[path.index(rank) :]
