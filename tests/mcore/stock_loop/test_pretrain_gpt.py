"""pretrain_gpt.py with Megatron-LM's loop: command lines that people have, under megatron-core's schedule and ours."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.command_lines import EVERYDAY, FORK_ZB, FORK_ZBV, on_cpu
from tests.support.megatron_lm import MISSING, logged, pretrain_gpt
from tests.support.ranks import RankPool

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip(MISSING, allow_module_level=True)

pytestmark = pytest.mark.claims(
    "Your own script",
    "this project's `pretrain_gpt.py`, which runs Megatron-LM's loop: the flags of the authors' fork's example and of "
    "Megatron-LM's for GPT-3, Llama-3 and Mixtral, without FP8; stock, ZB-H1 and ZBV, fp16, bf16, experts, post-validation "
    "(`make test MCORE=0.19.2`)",
    "works; ZB-H1 in every printed digit of stock; **not run on a GPU**",
)


def losses(ranks: RankPool, flags: str) -> list[tuple[str, ...]]:
    """What the last rank printed of ten iterations and the evaluations behind them."""
    lines = list(logged(ranks.run(pretrain_gpt, flags)[-1]).values())
    assert len(lines) >= 10
    return lines


@pytest.mark.parametrize("name", EVERYDAY)
@pytest.mark.sampled(0.3)
def test_a_command_line_trains_under_every_schedule(four_ranks: RankPool, name: str) -> None:
    # in fp16 the usual first loss scale skips all ten steps, which then log no loss
    line = f"{on_cpu(EVERYDAY[name])} --attention-dropout 0 --hidden-dropout 0 --initial-loss-scale 1024"
    zb, zbv = (FORK_ZB, FORK_ZBV) if name == "fork" else ("--enable-zero-bubble", "--zero-bubble-v-schedule")
    expected = losses(four_ranks, line)
    assert losses(four_ranks, f"{line} {zb}") == expected
    in_v = losses(four_ranks, f"{line} {zbv}")
    # ZBV draws other weights, as chunks are built in another order; both begin at the loss of a guess
    assert float(in_v[0][0]) == pytest.approx(float(expected[0][0]), rel=0.02)
