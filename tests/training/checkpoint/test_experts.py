"""Checkpoints of experts, whose optimizer has two parts where ranks share them: loaded by the other kind, and by one part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import RankPool
from tests.training.checkpoint.test_layouts import DISTRIBUTED, H1, V2, walk

pytestmark = pytest.mark.claims(
    "Layers",
    "checkpoints of experts between plain and distributed optimizer, between expert-parallel sizes, and where a pipeline rank"
    " has none (`make test-slow`)",
    "works, bit for bit; the losses after 1e-6 (bf16 1e-3)",
)

EXPERTS = "--num-experts 4 --moe-layer-freq [0,0,0,0,1,1,1,1]"
SHARED = f"{EXPERTS} --expert-model-parallel-size 2"
DENSE_FIRST, BOTH = f"{H1} {SHARED}", f"{V2} {SHARED}"
"""The first pipeline rank has no experts, so that its optimizer's second part is empty; every rank has some."""
CHAINS = {
    "to distributed": [DENSE_FIRST, f"{BOTH} {DISTRIBUTED}", f"{H1} {EXPERTS}", f"{DENSE_FIRST} {DISTRIBUTED}"],
    "to plain": [f"{DENSE_FIRST} {DISTRIBUTED}", DENSE_FIRST, f"{H1} {EXPERTS} {DISTRIBUTED}", BOTH, DENSE_FIRST],
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_checkpoint_of_experts_loads_with_any_optimizer(
    name: str, precision: str, four_ranks: RankPool, tmp_path: Path
) -> None:
    """Weights, master weights and optimizer state bit for bit; with expert parallelism tokens are summed in another order."""
    chain = [f"{flags} {precision}" for flags in CHAINS[name]]
    walks = four_ranks.run(walk, chain, str(tmp_path))
    for flags, differing in zip(chain, walks[0].differing, strict=True):
        assert differing == [], flags
    for seen in walks:
        assert seen.actual == pytest.approx(seen.expected, rel=1e-3 if precision else 1e-6)
