"""Megatron-Bridge from PyPI, not a line of it edited, on CPU ranks (`make test-frameworks`)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.bridge import GPT, INTERLEAVED, VANILLA, Run, pretrain
from tests.support.ranks import RankPool
from tests.training.launch import ROOT, command, environment

pytestmark = pytest.mark.claims(
    "Your own script",
    "Megatron-Bridge 0.6.2 from PyPI, unedited (`make test-frameworks`): ZB-H1 and ZBV beside stock, bf16, checkpoints of "
    "one schedule resumed under another, `zerobubble run` and `install()`",
    "ZB-H1: every bit of stock's losses and norms; ZBV: every bit of stock's losses; **not run on a GPU**",
)

SCRIPT = Path(__file__).with_name("bridge_script.py")
BF16 = {name: value for name, value in GPT.items() if name not in ("mixed_precision", "model.pipeline_dtype")}
SHARDED = {"ddp.use_distributed_optimizer": True}
BY_PARAMETER = {"checkpoint.dist_ckpt_optim_fully_reshardable": True}
"""Without it the distributed optimizer's state is stored by bucket, and fits no other number of chunks."""


def bits(runs: list[Run]) -> list[tuple[dict[int, dict[str, float]], dict[int, float]]]:
    """Of losses and norms, by rank and iteration."""
    assert losses(runs)
    return [(run.losses, run.norms) for run in runs]


def losses(runs: list[Run]) -> dict[int, dict[str, float]]:
    """Of the ranks that have some: iteration -> losses."""
    return {step: loss for run in runs for step, loss in run.losses.items() if loss}


def assert_ran(runs: list[Run], schedule: str) -> None:
    assert {run.schedule for run in runs} == {schedule}


@pytest.mark.parametrize("model", [GPT, {**GPT, **SHARDED}, BF16], ids=["fp32", "sharded", "bf16"])
def test_zb_h1_has_every_bit_of_stock(two_ranks: RankPool, model: dict[str, Any]) -> None:
    stock = two_ranks.run(pretrain, VANILLA, model)
    ours = two_ranks.run(pretrain, VANILLA, model, "zb-h1")
    assert_ran(stock, "stock")
    assert_ran(ours, "zb-h1")
    assert bits(ours) == bits(stock)
    printed = [re.findall(r"(?:lm loss|grad norm|lm loss value): \S+", run.printed) for run in (stock[-1], ours[-1])]
    assert len(printed[0]) == 5 + 5 + 3, "iterations, their norms, evaluations"
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("writes", "reads", "chunks"),
    [("stock", "zbv", INTERLEAVED), ("zbv", "stock", INTERLEAVED), ("stock", "zb-h1", {}), ("zb-h1", "stock", {})],
)
def test_one_schedule_goes_on_from_the_checkpoint_of_another(
    two_ranks: RankPool, tmp_path: Path, writes: str, reads: str, chunks: dict[str, Any]
) -> None:
    model = {**GPT, **SHARDED, **BY_PARAMETER, **chunks}
    ours = next(name for name in (writes, reads) if name != "stock")
    expected = losses(two_ranks.run(pretrain, VANILLA, model))
    saving = {"checkpoint.save": str(tmp_path), "checkpoint.save_interval": 2, "train.train_iters": 2}
    first = two_ranks.run(pretrain, VANILLA, {**model, **saving}, None if writes == "stock" else writes)
    assert_ran(first, writes)
    rest = two_ranks.run(pretrain, VANILLA, {**model, "checkpoint.load": str(tmp_path)}, None if reads == "stock" else reads)
    assert_ran(rest, reads)
    assert losses(first) | losses(rest) == expected, ours


def start(*words: object) -> subprocess.CompletedProcess[str]:
    """A job as torchrun starts it."""
    variables = environment()
    variables["PYTHONPATH"] = f"{Path(__file__).with_name('site')}:{variables['PYTHONPATH']}"
    return subprocess.run(
        command(words, num_ranks=2, module="megatron.zerobubble.run"),
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_jobs_as_users_start_them(tmp_path: Path) -> None:
    """Stock, installed by `zerobubble run`, which saves, and installed by the script itself."""
    saving = (f'checkpoint.save="{tmp_path}"', "checkpoint.save_interval=5")
    stock = start("--cpu", "--zero-bubble-schedule", "stock", SCRIPT)
    outside = start("--cpu", "--enable-zero-bubble", SCRIPT, *saving)
    inside = start("--cpu", "--zero-bubble-schedule", "stock", SCRIPT, "schedule=zb-h1")
    for done in (stock, outside, inside):
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [re.findall(r"(lm loss: \S+) .*?(grad norm: \S+)", done.stdout + done.stderr) for done in (stock, outside, inside)]
    assert len(found[0]) == 5
    assert found[0] == found[1] == found[2]
    assert "zero bubble: zb-h1, p = 2" not in stock.stderr
    assert "zero bubble: zb-h1, p = 2" in outside.stderr
    assert "zero bubble: zb-h1, p = 2" in inside.stderr
    assert (tmp_path / "latest_checkpointed_iteration.txt").is_file() or any(tmp_path.glob("iter_*"))
