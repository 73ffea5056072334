"""Optimistic steps with MTP layers: their losses follow the loss scale, and forwards that run again count once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.optimizer.support import Scenario, compare
from tests.support.mtp import ZB_H2, ZBV
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims("Layers", "multi-token prediction with optimistic steps", "works, bit for bit as synchronous")

SCENARIOS = (
    # The loss scale falls between the first forwards of an iteration and their backwards.
    Scenario(
        "overflow before the heads",
        replace(ZB_H2, tied=True, dtype=torch.float16, dropout=0.1, clip_grad=1e3, num_mtp_layers=1),
        spikes={(2, 1): math.inf, (3, 0): math.inf},
        redone=(2, 3),
    ),
    Scenario(
        "clipping",
        replace(ZBV, tied=True, dropout=0.1, clip_grad=1e3, num_mtp_layers=1),
        spikes={(3, 1): 1e4, (4, 0): 1e4},
        redone=(3, 4),
    ),
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
@pytest.mark.sampled(0.5)
def test_optimistic_steps_equal_synchronous_steps(four_ranks: RankPool, scenario: Scenario) -> None:
    results = four_ranks.run(compare, scenario)
    for rank, (differences, redone, _, _steps) in enumerate(results):
        assert differences == [], rank
        assert tuple(redone) == scenario.redone, rank
    assert all(steps == results[0][3] for *_, steps in results), "the outcomes differ between ranks"
