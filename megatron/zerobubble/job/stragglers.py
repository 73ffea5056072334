"""Ranks whose passes take much longer than those of the others: named in the log, not ended."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

from megatron.zerobubble.job.heartbeats import Beat

__all__ = ["Stragglers"]

_FACTOR = 2.0
_MIN_ITERATIONS = 5
_TIMES_IN_A_ROW = 2


class Stragglers:
    """Compares the time that each rank's ops took per iteration, over some iterations at a time.

    Stages need not take equally long, so a rank is named only if its ops take twice as long as those of the median rank, two
    times in a row, and once until that has changed.
    """

    def __init__(self) -> None:
        self._before: Mapping[int, Beat] = {}
        self._in_a_row: dict[int, int] = {}

    def look(self, beats: Mapping[int, Beat]) -> list[str]:
        """Lines about ranks that have become slow.

        Args:
            beats: the newest beat of every rank.
        """
        if not self._before or set(self._before) != set(beats):
            self._before = dict(beats)
            return []
        done = {rank: beat.num_iterations - self._before[rank].num_iterations for rank, beat in beats.items()}
        if min(done.values()) < _MIN_ITERATIONS:
            return []
        each_s = {rank: (beat.busy_s - self._before[rank].busy_s) / done[rank] for rank, beat in beats.items()}
        self._before = dict(beats)
        typical_s = median_low(each_s.values())
        lines = []
        for rank, seconds in sorted(each_s.items()):
            if typical_s <= 0.0 or seconds < _FACTOR * typical_s:
                self._in_a_row.pop(rank, None)
                continue
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1
            if self._in_a_row[rank] == _TIMES_IN_A_ROW:
                lines.append(_line(rank, beats[rank], 1000.0 * seconds, 1000.0 * typical_s))
        return lines


def _line(rank: int, beat: Beat, own_ms: float, typical_ms: float) -> str:
    return (
        f"rank {rank} ({beat.process.host.split()[0]}) is slow: its passes take {own_ms / typical_ms:.1f} times as long as those "
        f"of the median rank ({own_ms:.0f} ms and {typical_ms:.0f} ms per iteration, iteration {beat.num_iterations})"
    )
