"""The moves of annealing, which change an order a little, and their random numbers.

This file and `moves.hpp` are twins (see `core`): change both together.

A move takes rows (per rank a string of op codes, see `core`) and returns the changed ones as {rank: new row}, empty
if nothing changes. The result may deadlock; scoring detects that.
"""

from __future__ import annotations

from collections.abc import Sequence

ROTATE_SHARE = 0.3
"""Share of reassignments that move one microbatch to another slot, and those between by one, instead of swapping two."""

CRITICAL_SHARE = 0.7
"""Share of single moves that take an op on the critical path, because no other single move shortens it."""

_MASK = (1 << 64) - 1


class Random:
    """SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), which is easy to implement identically in Python and C++."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def bits(self) -> int:
        """64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def unit(self) -> float:
        """Uniform in [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53

    def below(self, limit: int) -> int:
        """Uniform in 0..limit-1."""
        return self.bits() % limit


class Moves:
    """The moves for plans of one size.

    Args:
        num_microbatches: m.
        chunks: stages per rank.
    """

    def __init__(self, num_microbatches: int, chunks: Sequence[int]) -> None:
        self._m = num_microbatches
        self._p = len(chunks)
        self._chunks = list(chunks)

    def vary_patience(self, patience: list[float], random: Random) -> list[float]:
        """Set another patience for some ranks."""
        first, last = self._some_ranks(random)
        value = random.unit() * 1.5
        return [value if first <= rank <= last else old for rank, old in enumerate(patience)]

    def single_move(self, rows: list[bytearray], critical: Sequence[tuple[int, int]], random: Random) -> dict[int, bytearray]:
        """Move one op a few steps earlier or later."""
        if random.unit() < CRITICAL_SHARE:
            rank, source = critical[random.below(len(critical))]
        else:
            rank = random.below(self._p)
            source = random.below(len(rows[rank]))
        row = rows[rank]
        scale = random.unit()
        distance = 1 + int(scale * scale * scale * (3 * self._chunks[rank] + 6))
        target = source + distance if random.below(2) else source - distance
        if not 0 <= target < len(row):
            return {}
        moved = bytearray(row)
        moved.insert(target, moved.pop(source))
        return {rank: moved} if moved != row else {}

    def repeated_swap(self, rows: list[bytearray], kinds: int, random: Random) -> dict[int, bytearray]:
        """Swap every adjacent pair of two given op codes within a window, which changes the steady state."""
        first, last = self._some_ranks(random)
        chunks = self._chunks[first]
        before = 3 * random.below(chunks) + random.below(kinds)
        after = 3 * random.below(chunks) + random.below(kinds)
        length = len(rows[first])
        low, high = self._some_of(length, random)
        if before == after:
            return {}
        changed = {}
        for rank in range(first, last + 1):
            row = bytearray(rows[rank])
            step = low
            while step + 1 < min(high, len(row)):
                if row[step] == before and row[step + 1] == after:
                    row[step], row[step + 1] = after, before
                    step += 1
                step += 1
            if row != rows[rank]:
                changed[rank] = row
        return changed

    def repeated_shift(self, rows: list[bytearray], random: Random) -> dict[int, bytearray]:
        """Move the F or B of one chunk by the same number of steps for many microbatches and, with a drift, over many ranks."""
        first, last = self._some_ranks(random)
        chunks = self._chunks[first]
        code = 3 * random.below(chunks) + random.below(2)
        scale = random.unit()
        distance = 1 + int(scale * scale * (3 * chunks))
        later = random.below(2) == 1
        low, high = self._some_of(self._m, random)
        slope = random.below(3) - 1
        changed = {}
        for rank in range(first, last + 1):
            drift = slope * (rank - first)
            row = bytearray(rows[rank])
            steps = range(len(row))
            count = -1
            for step in reversed(steps) if later else steps:
                if row[step] != code:
                    continue
                count += 1
                microbatch = self._m - 1 - count if later else count
                target = step + distance if later else step - distance
                if low + drift <= microbatch <= high + drift and 0 <= target < len(row):
                    row.insert(target, row.pop(step))
            if row != rows[rank]:
                changed[rank] = row
        return changed

    def reassign(self, slots: Sequence[int], random: Random) -> list[int]:
        """Assign two microbatches to each other's slots, or move one to another slot; there are at least two."""
        m = len(slots)
        start = random.below(m)
        target = (start + 1 + random.below(m - 1)) % m
        changed = list(slots)
        if random.unit() >= ROTATE_SHARE:
            changed[start], changed[target] = changed[target], changed[start]
        else:
            changed.insert(target, changed.pop(start))
        return changed

    def _some_ranks(self, random: Random) -> tuple[int, int]:
        """A random range of ranks, as (first, last): all, several adjacent ones, or one."""
        first = random.below(self._p)
        choice = random.unit()
        if choice < 0.3:
            return 0, self._p - 1
        if choice < 0.7:
            return first, min(self._p - 1, first + 1 + random.below(self._p))
        return first, first

    def _some_of(self, length: int, random: Random) -> tuple[int, int]:
        """A random window of `length` steps or microbatches; each end is open with probability one half."""
        low, high, free = random.below(length), random.below(length), random.below(4)
        return 0 if free & 1 else min(low, high), length if free & 2 else max(low, high)
