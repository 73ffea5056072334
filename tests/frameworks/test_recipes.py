"""Recipes of Megatron-Bridge with their options, shrunk in sizes: ten iterations under stock, ZB-H1 and ZBV (`recipes`)."""

from __future__ import annotations

import pytest

from tests.frameworks.bridge import INTERLEAVED, Run, train_recipe
from tests.frameworks.recipes import RECIPES
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

pytestmark = pytest.mark.claims(
    "Your own script",
    "recipes of Megatron-Bridge shrunk in sizes, ten iterations on four ranks: Llama-3.1-405B, DeepSeek-V3, Qwen3-235B, Kimi-K2, "
    "Nemotron-3-Super; [what was left out](recipes.md#ran-as-jobs-here) (`make test-frameworks`)",
    "ZB-H1: every bit of stock's losses and norms; ZBV: its losses, but for sums in another order; **not run on a GPU**",
)

LATER = 0.01
"""Relative, of losses of ZBV from the third to the sixth. The norm that clips gradients is a sum in another order; its last bit
moves weights to the next bf16 number, and then routers choose other experts for ever more tokens: the last ones have learned."""


def losses(runs: list[Run], schedule: str) -> list[float]:
    """Of the iterations. This schedule ran."""
    assert {run.schedule for run in runs} == {schedule}
    (found,) = {tuple(loss["lm loss"] for loss in run.losses.values()) for run in runs if any(run.losses.values())}
    assert len(found) == 10
    return list(found)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.timeout(900)
def test_a_recipe_has_stocks_losses(four_ranks: RankPool, name: str) -> None:
    stock = four_ranks.run(train_recipe, name, {})
    ours = four_ranks.run(train_recipe, name, {}, "zb-h1")
    expected = losses(stock, "stock")
    assert expected[-1] < 0.8 * expected[0]
    assert losses(ours, "zb-h1") == expected
    assert [run.norms for run in ours] == [run.norms for run in stock]
    assert {run.replays > 0 for run in stock + ours} == {RECIPES[name].graphs}
    chunks, drawn = RECIPES[name].chunks, RECIPES[name].drawn
    if chunks is not None:
        if drawn:
            expected = losses(four_ranks.run(train_recipe, name, drawn), "stock")
        in_v = losses(four_ranks.run(train_recipe, name, {**chunks, **drawn, **INTERLEAVED}, "zbv"), "zbv")
        assert in_v[:2] == pytest.approx(expected[:2], rel=OTHER_ORDER)
        assert in_v[:6] == pytest.approx(expected[:6], rel=LATER)
        assert in_v[-1] < 0.8 * expected[0]
