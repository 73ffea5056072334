"""When nothing computes inside an op or a pair: its tokens travel to or from experts, and no other pass or W is beside that."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["exposed"]


def exposed(passes: int, start: float, end: float, changes: Iterable[tuple[float, int]]) -> list[tuple[float, float]]:
    """The intervals in which no pass and no wgrad GEMM computes, in ascending order and not empty.

    Args:
        passes: how many compute from the start on: 1, or 2 of a pair.
        start: of the op or the pair, in milliseconds.
        end: likewise.
        changes: (time, by how much the number changes), in any order: two passes are on a thread each.
    """
    found, computing, since = [], passes, start
    for time, change in (*sorted(changes, key=lambda each: each[0]), (end, 1)):
        if computing <= 0 and time > since:
            found.append((since, time))
        computing, since = computing + change, time
    return found
