"""ms-swift from PyPI, not a line of it edited, on CPU ranks (`make test-frameworks`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.swift_sft import NUM_STEPS, train, write_inputs
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

pytestmark = pytest.mark.claims(
    "Your own script",
    "ms-swift 4.6.0's supervised fine-tuning (`megatron sft`) on a model of mcore-bridge 1.6.5 from PyPI, unedited (`make "
    "test-frameworks`): rows of unequal lengths, in bf16",
    "ZB-H1: every bit of stock's losses and norms; ZBV: its first losses, later ones to 0.1 %; **not run on a GPU**",
)

LATER = 0.001
"""Relative, of losses of ZBV with weights of which some are the next bf16 number: the norm is a sum in another order."""


@pytest.fixture(scope="module")
def swift_ranks() -> Iterator[RankPool]:
    """Two gloo ranks with ms-swift."""
    pool = RankPool(2, imports="tests.frameworks.swift_imports")
    yield pool
    pool.stop()


def test_zb_h1_has_every_bit_of_stock_and_zbv_but_for_the_norm(swift_ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    swift_ranks.run(write_inputs, folder)
    stock = swift_ranks.run(train, folder)
    assert [schedule for schedule, _, _ in stock] == ["stock"] * 2
    ours = swift_ranks.run(train, folder, "zb-h1")
    assert [schedule for schedule, _, _ in ours] == ["zb-h1"] * 2
    assert [run[1:] for run in ours] == [run[1:] for run in stock]
    in_v = swift_ranks.run(train, folder, "zbv", "--virtual_pipeline_model_parallel_size 2")
    assert [schedule for schedule, _, _ in in_v] == ["zbv"] * 2
    (_, expected, expected_norms), (_, losses, norms) = stock[-1], in_v[-1]
    assert len(expected_norms) == NUM_STEPS
    assert losses[0] == expected[0]
    assert norms[0] == pytest.approx(expected_norms[0], rel=OTHER_ORDER)
    assert norms == pytest.approx(expected_norms, rel=LATER)
    for ours_, theirs in zip(losses, expected, strict=True):
        assert [each["loss"] for each in ours_] == [pytest.approx(each["loss"], rel=LATER) for each in theirs]
