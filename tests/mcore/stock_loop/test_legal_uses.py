"""What loops do with megatron-core's schedules comes to the same, bit for bit, with a schedule installed.

Weights are drawn by name, each gradient is summed over the microbatches in their order, and gradients are not clipped, so nothing
is summed in another order. The baseline is megatron-core's 1F1B.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.legal_uses import CHUNKS, USES, run_use
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own: 33 uses that megatron-core's schedules allow (two models, two optimizers, frozen weights, "
    "accumulation over calls, skipped steps, `no_sync`, evaluations, other sizes each call, errors that are caught, timers, "
    "hooks, `uninstall`, ...): ZB-H1, interleaved ZB, ZBV",
    "works, bit for bit",
)

_SCHEDULES = [schedule for schedule in CHUNKS if schedule is not None]
_LEFT_OUT = {
    ("stock_after_uninstall", "zbv"): "after uninstall stages that sit in a V stay there, and only a V schedule runs them",
}
"""Uses that are not legal under a schedule, with the page that says so."""
_BASELINES = {"an_error_in_the_first_microbatch_of_an_evaluation": "an_error_in_the_last_microbatch_of_an_evaluation"}
"""Uses that stock cannot go on from: it leaves messages of the failed call behind, which other ranks wait for."""


@pytest.fixture(scope="module")
def stock() -> dict[str, dict[str, Any]]:
    """What each use comes to under megatron-core's 1F1B, once it has run."""
    return {}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("schedule", _SCHEDULES)
@pytest.mark.sampled(0.2)
def test_a_legal_use_comes_to_the_same_as_under_1f1b(
    two_ranks: RankPool, stock: dict[str, dict[str, Any]], name: str, schedule: str
) -> None:
    if (name, schedule) in _LEFT_OUT:
        pytest.skip(_LEFT_OUT[name, schedule])
    baseline = _BASELINES.get(name, name)
    if baseline not in stock:
        stock[baseline] = _merged(two_ranks.run(run_use, baseline, None))
    _check_equal(_merged(two_ranks.run(run_use, name, schedule)), stock[baseline], name)


def _merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    first, second = ranks
    assert not first.keys() & second.keys()
    return first | second


def _check_equal(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for name in expected:
            _check_equal(actual[name], expected[name], f"{where}: {name}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            _check_equal(one, other, f"{where}, {number}")
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=where)
