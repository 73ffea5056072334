"""Transformer Engine's real Python under every schedule, against the same model without a pipeline: bit for bit.

Both sides run megatron-core's own layer specs and Transformer Engine's own modules on `tests.support.transformer_engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.ranks import RankPool
from tests.support.transformer_engine import chosen_version, unpacked
from tests.support.transformer_engine.gpt import EngineCase, EngineMoeCase, compare_engine

pytestmark = pytest.mark.skipif(
    unpacked() is None, reason=f"Transformer Engine's Python was not fetched: python -m tools.releases te {chosen_version()}"
)


@pytest.fixture(scope="module")
def engine_ranks() -> Iterator[RankPool]:
    """Four gloo ranks with Transformer Engine, started once."""
    pool = RankPool(4, prepare="tests.support.transformer_engine")
    yield pool
    pool.stop()


SCHEDULES = [
    EngineCase("zb-h1", 2, 4, fuses=True),
    EngineCase("zb-h1", 4, 6),
    EngineCase("zb-h2", 2, 4),
    EngineCase("zb-h2", 4, 6, fuses=True),
    EngineCase("zbv", 2, 4, num_chunks=2),
    EngineCase("zbv", 4, 6, num_chunks=2, fuses=True),
    EngineCase("v-half", 2, 4, num_chunks=2, fuses=True),
    EngineCase("v-half", 4, 6, num_chunks=2),
]


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_same_bits_as_the_unpipelined_model(engine_ranks: RankPool, case: EngineCase) -> None:
    _assert_equal(engine_ranks, case)


def _assert_equal(pool: RankPool, case: EngineCase | EngineMoeCase, tolerance: float = 0.0) -> None:
    for rank, (difference, counts, left) in enumerate(pool.run(compare_engine, case)):
        assert max(difference.losses, difference.gradients, difference.weights) <= tolerance, (rank, difference)
        assert not left
        kinds = [kind for kind in counts if not kind.endswith(" modules")]
        assert "TELayerNormColumnParallelLinear" in kinds
        assert "TERowParallelLinear" in kinds
        for kind in kinds:
            assert counts[kind] == counts[f"{kind} modules"] * case.num_microbatches * case.num_steps, (rank, counts)
