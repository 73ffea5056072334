"""Dependencies between ops, an order in which a plan's ops can run, and the marked grid of error messages.

The dependency rules for the validator, the simulator and the executor (arXiv 2401.10241, section 2), all within one microbatch,
and between stages within one slice of it:

- F of a stage needs F of the previous stage;
- B or BW of a stage needs the input gradient of the next stage (from a BW it is available only at its end), and its own F;
- W of a stage needs its own B.

Of the slices of a microbatch, F needs that of the slice before, and B that of the slice after, on the same stage. That is the
order in which `validate` lets a stage run them.

Each rank runs its ops in the plan's order, one at a time; a result is available once its op has ended. A pair is one node: it
needs what its two ops need, and its results are available once both have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from megatron.zerobubble.errors import DeadlockError
from megatron.zerobubble.plan.ir import Op, OpKind, Plan, launch_text


def result_of(op: Op) -> Op:
    """The result that `op` produces for others, named by its op: a BW produces the result of the B it contains."""
    return op._replace(kind=OpKind.B) if op.kind is OpKind.BW else op


def requirements(op: Op, num_stages: int) -> tuple[Op, ...]:
    """The results (see `result_of`) that must exist before `op` can start, in a model of `num_stages` stages."""
    stage, kind, *which = op
    if kind is OpKind.F:
        return (Op(stage - 1, OpKind.F, *which),) if stage > 0 else ()
    if kind is OpKind.W:
        return (Op(stage, OpKind.B, *which),)
    own_forward = Op(stage, OpKind.F, *which)
    if stage + 1 < num_stages:
        return (Op(stage + 1, OpKind.B, *which), own_forward)
    return (own_forward,)


def execution_order(plan: Plan) -> list[tuple[int, int]]:
    """An order over all ranks in which every op runs after its requirements. Linear in the number of ops.

    Returns:
        (rank, step) for every launch of the plan (`Plan.launches`) once; the same plan always gives the same order.

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
        row = plan.launches[rank]
        for step in range(position[rank], len(row)):
            needs = (need for op in row[step] for need in requirements(op, plan.num_stages))
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            order.append((rank, step))
            position[rank] = step + 1
            for result in map(result_of, row[step]):
                done.add(result)
                ready.extend(waiting.pop(result, ()))
    if len(order) < sum(map(len, plan.launches)):
        raise DeadlockError(_deadlock_text(plan, position, waiting))
    return order


def _deadlock_text(plan: Plan, position: list[int], waiting: dict[Op, list[int]]) -> str:
    """The error message: the op each stuck rank waits for, the ranks of one cycle first, because they are the cause."""
    awaited = {rank: need for need, ranks in waiting.items() for rank in ranks}
    location = {result_of(op): (rank, step) for rank, row in enumerate(plan.ops) for step, op in enumerate(row)}
    cycle = _cycle(awaited, {rank: location[need][0] for rank, need in awaited.items() if need in location})
    stuck = cycle + sorted(set(awaited) - set(cycle))
    steps = [sum(map(len, row[:at])) for row, at in zip(plan.launches, position, strict=True)]
    lines = [f"plan {plan.schedule!r} deadlocks: {len(stuck)} of {plan.num_ranks} ranks can never proceed"]
    for rank in stuck[:MAX_ROWS]:
        launch, need = plan.launches[rank][position[rank]], awaited[rank]
        op = next(each for each in launch if need in requirements(each, plan.num_stages))
        where = "which rank {} runs at step {}".format(*location[need]) if need in location else "which no rank computes"
        pair = f", with {op} in the pair {launch_text(launch)}" if len(launch) > 1 else f", {op}"
        lines.append(f"  rank {rank} is at step {steps[rank]}{pair} ({op.where}), and waits for {need}, {where}")
    if len(stuck) > MAX_ROWS:
        lines.append(f"  ... and {len(stuck) - MAX_ROWS} more ranks")
    lines.append("move each awaited op before the op at which its own rank is stuck:")
    lines.append(marked_grid(plan, [(rank, steps[rank]) for rank in stuck]))
    return "\n".join(lines)


def _cycle(awaited: dict[int, Op], blocker: dict[int, int]) -> list[int]:
    """Ranks that wait for each other in a cycle, or one rank that waits for an op that no rank computes."""
    path: list[int] = []
    rank = min(awaited)
    while rank not in path:
        path.append(rank)
        if rank not in blocker:
            return [rank]
        rank = blocker[rank]
    return path[path.index(rank) :]


MAX_ROWS = 16
"""Most ranks in a grid."""

MAX_COLUMNS = 12
"""Most steps per row of a grid."""


def marked_grid(plan: Plan, cells: Iterable[tuple[int, int]]) -> str:
    """A plan as a rank x step grid, with the given cells marked: ``>1W0<``, or ``>--<`` for a missing op.

    The grid has a bounded size: a window of columns around the marked cells, and the ranks near them.

    Args:
        plan: any plan, valid or not.
        cells: (rank, step) pairs; a rank's row is centered on its first one.

    Returns:
        One line per rank under a line of step numbers. If the marked cells are too far apart for one window, each row is centered
        on its own cell and begins with its own step number instead.
    """
    marked = list(cells)
    center = dict(reversed(marked))
    steps = sorted(center.values()) or [0]
    shared = steps[-1] - steps[0] + 1 <= MAX_COLUMNS - 2
    middle = (steps[0] + steps[-1]) // 2 if shared else steps[len(steps) // 2]
    lines: list[list[str]] = []
    longest = max(map(len, plan.ops))
    width = min(MAX_COLUMNS, max(longest, steps[-1] + 1))
    if shared:
        first = _window_start(middle, width, max(longest, steps[-1] + 1))
        lines.append(["step", *map(str, range(first, first + width))])
    ranks = _ranks_to_show(plan.num_ranks, sorted(center))
    for rank in ranks:
        if not shared:
            first = _window_start(center.get(rank, middle), width, max(len(plan.ops[rank]), center.get(rank, 0) + 1))
        label = f"rank {rank}" if shared else f"rank {rank} from step {first}"
        lines.append([label, *(_cell(plan, rank, step, marked) for step in range(first, first + width))])
    left_out = plan.num_ranks - len(ranks)
    tail = [f"  ({left_out} more ranks not shown)"] if left_out else []
    return "\n".join([*_aligned(lines), *tail])


def _window_start(middle: int, width: int, length: int) -> int:
    return max(0, min(middle - width // 2, length - width))


def _ranks_to_show(num_ranks: int, marked: list[int]) -> list[int]:
    """All ranks if they fit, else the marked ones and their neighbors."""
    if num_ranks <= MAX_ROWS:
        return list(range(num_ranks))
    chosen = set(marked[:MAX_ROWS])
    for distance in (1, 2, 3):
        for rank in marked[:MAX_ROWS]:
            for near in (rank - distance, rank + distance):
                if 0 <= near < num_ranks and len(chosen) < MAX_ROWS:
                    chosen.add(near)
    return sorted(chosen) or list(range(MAX_ROWS))


def _cell(plan: Plan, rank: int, step: int, marked: list[tuple[int, int]]) -> str:
    row = plan.ops[rank]
    text = str(row[step]) if step < len(row) else ""
    if (rank, step) in marked:
        return f">{text or '--'}<"
    return text or "."


def _aligned(lines: list[list[str]]) -> list[str]:
    label_width = max(len(line[0]) for line in lines)
    cell_width = max((len(cell) for line in lines for cell in line[1:]), default=0)
    return ["  " + line[0].ljust(label_width) + "".join(f" {cell:>{cell_width}}" for cell in line[1:]) for line in lines]
