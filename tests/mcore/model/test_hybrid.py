"""`HybridModel` under every schedule against the unpipelined one: same loss, same gradients, same weights after three steps.

fp32, and bit for bit, as in `test_equivalence`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.mcore.test_equivalence import _assert_equal
from tests.support.gpt import compare
from tests.support.hybrid import HAS_HYBRID_MODEL, WHY_NOT, HybridCase, case
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)

CASES = [
    case("zb-h1", 2, 4, "*-*E"),
    case("zb-h1", 2, 4, "*-*|-"),
    case("zbv", 2, 4, "*-*E*-*E", num_chunks=2),
    case("zbv", 2, 4, "*-*|E-|*|-*", num_chunks=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_as_the_unpipelined_model(four_ranks: RankPool, case: HybridCase) -> None:
    _assert_equal(four_ranks.run(compare, case), case)
