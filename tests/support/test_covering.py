"""The covering array: every possible pair occurs, nothing forbidden does, in few rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.covering import Constraint, Row, covering_array

FEATURES: dict[str, list[Any]] = {"a": [0, 1, 2], "b": [False, True], "c": ["x", "y", "z"], "d": [None, 1], "e": [1, 2, 3]}
CONSTRAINTS = [
    Constraint(("a", "b"), lambda a, b: a != 2 or b),
    Constraint(("b", "c"), lambda b, c: not b or c != "z"),  # with the first one: never 2 and z, which no constraint says
    Constraint(("c", "d", "e"), lambda c, d, e: not (c == "x" and d is None and e == 3)),
]


def allowed(row: Row) -> bool:
    return all(constraint.allows(*(row[name] for name in constraint.names)) for constraint in CONSTRAINTS)


def pairs(rows: list[Row]) -> set[Any]:
    return {(a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(sorted(row), 2)}


@pytest.mark.parametrize("seed", range(10))
def test_every_possible_pair_occurs_and_nothing_forbidden(seed: int) -> None:
    rows = covering_array(FEATURES, CONSTRAINTS, seed=seed)
    every = [dict(zip(FEATURES, values, strict=True)) for values in itertools.product(*FEATURES.values())]
    assert all(map(allowed, rows))
    assert pairs(rows) == pairs([row for row in every if allowed(row)])
    assert 9 <= len(rows) <= 16, "9 are needed for two features of three values"


def test_many_features_take_few_rows() -> None:
    """3^30 combinations; a chain of constraints that leaves one value open is no dead end."""
    features = {f"f{index:02}": [0, 1, 2] for index in range(30)}
    chain = [Constraint((f"f{index:02}", f"f{index + 1:02}"), lambda a, b: a <= b) for index in range(9)]
    rows = covering_array(features, chain, seed=0)
    assert len(rows) < 45
    assert {(0, 2), (1, 1), (0, 0), (2, 2)} <= {(row["f00"], row["f09"]) for row in rows}
