"""Optimistic steps with experts: one optimizer for dense weights and one for experts, whose ranks have different gradients.

The gradient that is clipped or overflows is that of an expert on one of two expert-parallel ranks; both must come to the same
verdict, because the forwards that are rerun contain collectives between them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.optimizer.support import ITERATIONS, Scenario, compare
from tests.support.moe import ZB_H2, ZBV, MoeCase
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Layers",
    "optimistic steps with experts: chained optimizers, an overflow on one expert rank, a rank without experts",
    "works, bit for bit",
)

INF = math.inf


def _case(base: MoeCase) -> MoeCase:
    return replace(base, dropout=0.1, clip_grad=1e3, expert_parallel=2, different_data=True, z_loss_coeff=0.1)


SCENARIOS = (
    # The loss scale falls between the first forwards of an iteration and their backwards: the routers' losses follow it.
    Scenario(
        "overflow in an expert",
        replace(_case(ZB_H2), dtype=torch.float16),
        spikes={(2, 1): INF, (3, 0): INF, (8, 1): math.nan},
        redone=(2, 3, 8),
    ),
    Scenario("an expert is clipped", replace(_case(ZBV), expert_bias=True), spikes={(3, 1): 1e4, (4, 0): 1e4}, redone=(3, 4)),
    Scenario(
        "a rank without experts",
        replace(_case(ZB_H2), layer_freq=(1, 1, 0, 0)),
        spikes={(3, 0): 1e5, (11, 0): 1e5},
        redone=(3, 11),
    ),
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_optimistic_steps_equal_synchronous_steps(four_ranks: RankPool, scenario: Scenario) -> None:
    results = four_ranks.run(compare, scenario)
    for rank, (differences, redone, _, steps) in enumerate(results):
        assert differences == [], rank
        assert tuple(redone) == scenario.redone, rank
        assert len(steps) == ITERATIONS
    assert all(steps == results[0][3] for *_, steps in results), "the outcomes differ between ranks"
