"""A memory limit in bytes in a loop that makes its own optimizer: measured in its first iterations, then planned for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

import megatron.zerobubble
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.stock_loop import patches
from megatron.zerobubble.mcore.stock_loop.running import _state_bytes
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.simulate import peak_memory
from tests.support.ranks import RankPool
from tests.support.stock import example, installed, train

pytestmark = pytest.mark.claims("Your own script", "in a loop of your own: memory limits in bytes", "works, bit for bit")

FOUR = "--pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 32 --train-iters 5 --num-microbatches 8"
CHUNKS = f"{FOUR} --virtual-pipeline-model-parallel-size 2"
SEARCH = "--zero-bubble-planning-seconds 0.1"


def _train(rank: int, flags: str) -> dict[str, Any]:
    """Train, and see what is planned: the peak before and after memory was measured, and the bytes that were measured."""
    warnings = _Warnings()
    logging.getLogger("megatron.zerobubble").addHandler(warnings)
    with installed(flags, by_flags=True, initializes=False) as args:
        history = example().train(args)
        loop = patches._installed()
        assert loop is not None
        (running,) = loop._models
        spec, plan = running.engine.schedule.spec, running.engine.schedule.plan(args.num_microbatches)
        assert running.engine.replanner is not None
        (memory, *_) = running.engine.replanner.memory[rank:]
        parameters = sum(parameter.numel() for chunk in running.chunks for parameter in chunk.parameters())
    logging.getLogger("megatron.zerobubble").removeHandler(warnings)
    return {
        "losses": [entry["losses"] for entry in history],
        "limit": spec.memory_limit,
        "peak": peak_memory(plan, CostModel.uniform(plan.placement))[rank],
        "state": memory.state_bytes,
        "parameters": parameters,
        "warnings": warnings.texts,
    }


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize(("stock", "flags"), [(CHUNKS, "--zero-bubble-v-schedule"), (FOUR, "--enable-zero-bubble")])
@pytest.mark.sampled(0.5)
def test_the_order_of_least_memory_runs_until_memory_is_measured(four_ranks: RankPool, stock: str, flags: str) -> None:
    expected = [[entry["losses"] for entry in history] for history in four_ranks.run(train, stock)]
    ample = four_ranks.run(_train, f"{stock} {flags} {SEARCH} --zero-bubble-memory-limit 1GiB")
    small = four_ranks.run(_train, f"{stock} {flags} {SEARCH} --zero-bubble-memory-limit 1KiB")
    for results in (ample, small):
        assert [losses for losses in (result["losses"] for result in results) if losses][-1] == expected[-1]
        for result in results:
            assert result["limit"] == 0.25, "one of four microbatches"
            # fp32: weights, gradients, two moments of Adam
            assert result["state"] == pytest.approx(16 * result["parameters"], rel=0.05)
    assert max(result["peak"] for result in ample) > max(result["peak"] for result in small)
    assert any("alone exceed the memory limit" in text for text in small[0]["warnings"])


@pytest.mark.usefixtures("world_of_one")
def test_a_loop_with_an_optimizer_of_its_own_gets_an_error() -> None:
    original = vars(MegatronOptimizer)["__init__"]
    megatron.zerobubble.install(schedule="zbv", memory_limit="60GiB")
    try:
        installed = patches._installed()
        assert installed is not None
        assert vars(MegatronOptimizer)["__init__"] is not original
        with pytest.raises(ConfigError, match="make it by get_megatron_optimizer"):
            _state_bytes(installed.options, [torch.nn.Linear(1, 1)], installed.optimizers)
    finally:
        megatron.zerobubble.uninstall()
    assert vars(MegatronOptimizer)["__init__"] is original
