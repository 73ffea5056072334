"""Few combinations of many features in which each pair of values occurs: a covering array of strength 2, under constraints.

Most faults need the interaction of two features. The number of pairs grows with the square of the number of features, the number
of rows that cover all pairs only with its logarithm.

Greedy, row by row: a row starts from a pair that has not occurred and is completed with the values that add most new pairs.
The feature with the fewest values left is chosen next, with backtracking; so a pair for which no row is found is impossible, and
every possible pair occurs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, int]]
"""Two (feature, index of its value)."""

_ATTEMPTS = 5
"""Candidates for each row; the one with most new pairs is taken."""


@dataclass(frozen=True)
class Constraint:
    """Which values of some features may be combined."""

    names: tuple[str, ...]
    allows: Callable[..., bool]
    """A predicate on the values of `names`, in that order."""


def covering_array(features: Mapping[str, Sequence[Any]], constraints: Sequence[Constraint], *, seed: int) -> list[Row]:
    """Rows with a value for each feature, in which each pair of values that the constraints allow occurs.

    Args:
        features: name -> values.
        constraints: every row satisfies all of them.
        seed: the same seed gives the same rows.

    Raises:
        ValueError: a constraint names a feature that does not exist.
    """
    for constraint in constraints:
        for name in constraint.names:
            if name not in features:
                raise ValueError(f"a constraint names {name!r}, which is no feature; there are {', '.join(features)}")
    search = _Search(features, constraints, random.Random(seed))
    missing = {
        frozenset({(a, i), (b, j)})
        for a, b in itertools.combinations(features, 2)
        for i in range(len(features[a]))
        for j in range(len(features[b]))
    }
    rows = []
    for pair in search.shuffled(missing):
        if pair not in missing:
            continue
        found = [row for _ in range(_ATTEMPTS) if (row := search.complete(dict(pair), missing)) is not None]
        if not found:
            missing.discard(pair)  # impossible
            continue
        best = max(found, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        rows.append({name: features[name][best[name]] for name in features})
    return rows


def pairs_of(row: Mapping[str, int]) -> set[Pair]:
    """The pairs that occur in a row of indices."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


class _Search:
    def __init__(self, features: Mapping[str, Sequence[Any]], constraints: Sequence[Constraint], rng: random.Random) -> None:
        self._features = features
        self._rng = rng
        self._about: dict[str, list[Constraint]] = {name: [] for name in features}
        for constraint in constraints:
            for name in constraint.names:
                self._about[name].append(constraint)

    def shuffled(self, pairs: set[Pair]) -> list[Pair]:
        """The pairs in an order that depends on the seed only."""
        ordered = sorted(pairs, key=sorted)
        self._rng.shuffle(ordered)
        return ordered

    def complete(self, row: dict[str, int], missing: set[Pair]) -> dict[str, int] | None:
        """`row` with a value for every feature; None if there is none."""
        if not all(self._allowed(row, name) for name in row):
            return None
        left = {
            name: [index for index in range(len(values)) if self._allowed({**row, name: index}, name)]
            for name, values in self._features.items()
            if name not in row
        }
        if not left:
            return row
        name = min(left, key=lambda each: (len(left[each]), self._rng.random()))

        def new_pairs(index: int) -> tuple[int, float]:
            return sum(frozenset({(name, index), other}) in missing for other in row.items()), self._rng.random()

        for index in sorted(left[name], key=new_pairs, reverse=True):
            whole = self.complete({**row, name: index}, missing)
            if whole is not None:
                return whole
        return None

    def _allowed(self, row: Mapping[str, int], name: str) -> bool:
        """Whether no constraint on `name` that can be decided forbids `row`."""
        return all(
            constraint.allows(*(self._features[each][row[each]] for each in constraint.names))
            for constraint in self._about[name]
            if all(each in row for each in constraint.names)
        )
