"""The RL-style loop: the same lines under megatron-core's own 1F1B and zero-bubble schedules."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import megatron.zerobubble
from megatron.zerobubble.mcore.cpu.device import HostDevice
from tests.support.process_groups import destroy_groups
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER, after_steps
from tests.training.launch import launch

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "`examples/rl_loop.py`, an actor and a reference model on packed microbatches, with ZB-H1 and ZBV against megatron-core's"
    " 1F1B, on one replica through `zerobubble run` and on two",
    "works, within 1e-5; **not run on a GPU**",
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"
STOCK, ZB_H1 = "--zero-bubble-schedule stock", "--enable-zero-bubble"
OPTIMISTIC = "--enable-optimizer-post-validation --post-validation-patience 0"
ZBV = "--virtual-pipeline-model-parallel-size 2 --zero-bubble-v-schedule"


def _lines(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


def _train(rank: int, flags: str) -> list[dict[str, Any]]:
    """What this rank prints."""
    with mock.patch.object(sys, "path", [str(EXAMPLE.parent), *sys.path]):
        spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        loop = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loop)
    args = loop.parse(flags.split())
    destroy_groups()
    printed = io.StringIO()
    with HostDevice().on_host(), contextlib.redirect_stdout(printed):
        megatron.zerobubble.install(args, lengths=megatron.zerobubble.MicrobatchLengths("thd"))
        try:
            loop.train(args)
        finally:
            megatron.zerobubble.uninstall()
            destroy_groups()
    return _lines(printed.getvalue())


def _assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Microbatches run in the order that suits their lengths, so gradients are sums in another order."""
    assert [line["step"] for line in expected] == [1, 2, 3, 4]
    assert len({line["microbatches"] for line in expected}) > 1, "each step has its own number"
    first, other = ({name: value for name, value in lines[0].items() if name != "weights"} for lines in (actual, expected))
    assert first == other, "before the first step it makes no difference"
    assert actual == [pytest.approx(line, rel=after_steps(3, lr=1e-3), abs=OTHER_ORDER) for line in expected]
    assert expected[-1]["kl"] > expected[0]["kl"] == 0.0, "the actor moves, the reference does not"


@pytest.mark.parametrize("flags", [ZB_H1, ZBV, f"{ZB_H1} {OPTIMISTIC}"], ids=["zb-h1", "zbv", "zb-h1-optimistic"])
@pytest.mark.sampled(0.5)
def test_the_same_losses_as_stock(four_ranks: RankPool, flags: str) -> None:
    """On two replicas with microbatches of their own."""
    expected, actual = ([line for lines in four_ranks.run(_train, each) for line in lines] for each in (STOCK, flags))
    _assert_same(actual, expected)


@pytest.mark.slow
def test_the_commands_of_its_docstring() -> None:
    """Through torchrun and `zerobubble run`, on two ranks without a GPU."""
    printed = []
    for more in (STOCK, ZB_H1, ZBV):
        words = f"--cpu --microbatch-tokens thd {EXAMPLE} --distributed-backend gloo {more}".split()
        done = launch(words, num_ranks=2, module="megatron.zerobubble.run")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("\n") == done.stderr.count("zero bubble: ") == (more != STOCK), "none for the reference model"
        printed.append(_lines(done.stdout))
    _assert_same(printed[1], printed[0])
    _assert_same(printed[2], printed[0])
