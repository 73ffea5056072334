"""Context parallelism: attention over slices of sequences on two ranks against whole sequences on one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.gpt import Case, compare
from tests.support.ranks import RankPool

ZB_H1 = Case("zb-h1", 2, 4, context_parallel=2, num_steps=2, adam_eps=1.0)
ZBV = replace(ZB_H1, schedule="zbv", num_chunks=2)

CASES = [
    ZB_H1,
    replace(ZBV, llama=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_x(four_ranks: RankPool, case: Case) -> None:
    for difference in four_ranks.run(compare, case, replace(case.unpipelined, context_parallel=1)):
        print(difference)
        assert difference.gradients < 1e-6, difference.gradient_name
