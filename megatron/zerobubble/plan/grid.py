"""The rank x step grid that plan errors print, with the offending cells marked.

Bounded in size whatever the plan: a window of columns around the marked cells, and the ranks near them. A marked cell
looks like ``>1W0<``; a cell past the end of its row, where an op is missing, like ``>--<``.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.zerobubble.plan.ir import Plan

MAX_ROWS = 16
"""Ranks shown at most."""

MAX_COLUMNS = 12
"""Steps shown at most in one row."""


def marked_grid(plan: Plan, cells: Iterable[tuple[int, int]]) -> str:
    """Draw `plan` with the given cells marked.

    Args:
        plan: any plan, valid or not.
        cells: (rank, step) pairs; at most one a rank is centred on, the first.

    Returns:
        One line a rank under a line of step numbers. Where the marked cells lie further apart than a window is wide,
        each row is centred on its own cell and begins with its own step number instead.
    """
    marked = list(cells)
    centre = dict(reversed(marked))
    steps = sorted(centre.values()) or [0]
    shared = steps[-1] - steps[0] + 1 <= MAX_COLUMNS - 2
    middle = (steps[0] + steps[-1]) // 2 if shared else steps[len(steps) // 2]
    lines: list[list[str]] = []
    longest = max(map(len, plan.ops))
    width = min(MAX_COLUMNS, max(longest, steps[-1] + 1))
    if shared:
        first = _window_start(middle, width, max(longest, steps[-1] + 1))
        lines.append(["step", *map(str, range(first, first + width))])
    ranks = _ranks_to_show(plan.num_ranks, sorted(centre))
    for rank in ranks:
        if not shared:
            first = _window_start(centre.get(rank, middle), width, max(len(plan.ops[rank]), centre.get(rank, 0) + 1))
        label = f"rank {rank}" if shared else f"rank {rank} from step {first}"
        lines.append([label, *(_cell(plan, rank, step, marked) for step in range(first, first + width))])
    left_out = plan.num_ranks - len(ranks)
    tail = [f"  ({left_out} more ranks not shown)"] if left_out else []
    return "\n".join([*_aligned(lines), *tail])


def _window_start(middle: int, width: int, length: int) -> int:
    return max(0, min(middle - width // 2, length - width))


def _ranks_to_show(num_ranks: int, marked: list[int]) -> list[int]:
    """All ranks where they fit, else the marked ones and their neighbours."""
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
