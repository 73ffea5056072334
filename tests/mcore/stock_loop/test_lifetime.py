"""Models that a loop drops are freed, with their process groups and threads, while a schedule is installed."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

import megatron.zerobubble
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Seeds
from megatron.zerobubble.mcore.stock_loop import patches
from megatron.zerobubble.mcore.stock_loop.running import _state_bytes
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.simulate import peak_memory
from tests.support.ranks import RankPool
from tests.support.stock import example, installed, train, warnings_of_package

pytestmark = [
    pytest.mark.claims(
        "Your own script",
        "in a loop of your own: ten models made and dropped, ZB-H1, ZBV, post-validation, unequal lengths, memory limits: no "
        "model, process group or thread more than after the second",
        "works",
    ),
    pytest.mark.claims("Your own script", "in a loop of your own: memory limits in bytes", "works, bit for bit"),
]


TWO = "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --train-iters 2 --num-microbatches 2 --seq-length 8"
CHUNKS = f"{TWO} --virtual-pipeline-model-parallel-size 2"


_KEPT: list[Any] = []
"""Models of earlier tests in this process that megatron-core itself keeps: its distributed optimizer does."""


def _length(text: torch.Tensor) -> int:
    return text.size(1) - 1


def _state() -> dict[str, int]:
    """What exists in this process."""
    gc.collect()
    objects = gc.get_objects()
    tensors = {each.data_ptr(): each.nbytes for each in objects if isinstance(each, torch.Tensor) and each.is_cpu}
    return {
        "models": sum(isinstance(each, DistributedDataParallel) for each in objects) - len(_KEPT),
        "bytes": sum(tensors.values()),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": threading.active_count(),
    }


@contextlib.contextmanager
def _installed(flags: str, options: dict[str, Any]) -> Iterator[Any]:
    """The flags; models that exist already do not count."""
    with installed(flags, options) as args, mock.patch.object(example(), "initialize"):
        gc.collect()
        _KEPT[:] = [each for each in gc.get_objects() if isinstance(each, DistributedDataParallel)]
        yield args


def _rebuilds(rank: int, flags: str, options: dict[str, Any], count: int) -> list[dict[str, int]]:
    states = []
    with _installed(flags, options) as args:
        for _ in range(count):
            example().train(args)
            states.append(_state())
    return states


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (TWO, {"schedule": "zb-h1"}),
        (CHUNKS, {"schedule": "zbv"}),
        (f"{TWO} --calculate-per-token-loss", {"schedule": "zb-h1", "optimizer_post_validation": True}),
        (CHUNKS, {"schedule": "zbv", "optimizer_post_validation": True, "seeds": Seeds(dropout=1)}),
        (TWO, {"schedule": "zb-h1", "lengths": MicrobatchLengths(_length)}),
        (TWO, {"schedule": "zb", "memory_limit": "4GiB", "seeds": Seeds(weights=1)}),
    ],
    ids=["zb-h1", "zbv", "zb-h1-optimistic", "zbv-optimistic", "unequal", "limit"],
)
@pytest.mark.sampled(0.5, group="long loops")
def test_ten_models_need_what_one_needs(four_ranks: RankPool, flags: str, options: dict[str, Any]) -> None:
    for states in four_ranks.run(_rebuilds, flags, options, 10):
        assert [each["models"] for each in states] == [0] * 10
        assert states[-1] == states[1], "the first one's groups are destroyed when the second one starts"


def _kept_on_one_rank(rank: int, flags: str, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Numbers of models and of groups after each of six models, of which the second is kept by rank 1 until the fifth exists."""
    kept: list[Any] = []
    states = []
    with _installed(flags, options) as args:
        loop, build = example(), example().build_model
        for number in range(6):

            def keeping(*given: Any, number: int = number) -> Any:
                model = build(*given)
                if number == 1 and rank == 1:
                    kept.extend(model)
                return model

            if number == 5:
                kept.clear()
                gc.collect()
            with mock.patch.object(loop, "build_model", keeping):
                loop.train(args)
            states.append(_state())
        if rank == 1:  # of the last model, too: `uninstall` cannot validate a step that other ranks have forgotten
            with mock.patch.object(loop, "build_model", lambda *given: kept.extend(build(*given)) or list(kept)):
                loop.train(args)
        else:
            loop.train(args)
            gc.collect()
    return [each["models"] for each in states], [each["groups"] for each in states]


@pytest.mark.parametrize(
    ("flags", "options"),
    [(TWO, {"schedule": "zb-h1", "optimizer_post_validation": True}), (CHUNKS, {"schedule": "zbv"})],
    ids=["zb-h1-optimistic", "zbv"],
)
@pytest.mark.sampled(0.5, group="long loops")
def test_groups_stay_until_no_rank_has_the_model(four_ranks: RankPool, flags: str, options: dict[str, Any]) -> None:
    for rank, (models, groups) in enumerate(four_ranks.run(_kept_on_one_rank, flags, options)):
        assert (max(models) > 0) == (rank == 1)
        assert models[-1] == 0
        one, _, two, *_ = groups
        assert two > one
        assert groups == [one, one, two, two, two, one]


def _collected(rank: int, flags: str, schedule: str) -> tuple[bool, bool]:
    """Whether a dropped model's config, whose `finalize_model_grads_func` refers to the model, is freed; whether the loop's own
    function is back after `uninstall` in a config that is kept."""

    configs, loop = [], example()
    original, build_model, finalize = loop.transformer_config, loop.build_model, loop.finalize_model_grads

    def configured(args: Any) -> Any:
        configs.append(original(args))
        return configs[-1]

    def build(*given: Any) -> Any:
        model = build_model(*given)
        loop.finalize_model_grads = lambda *a, **k: (model, finalize(*a, **k))[1]
        return model

    replaced = {"transformer_config": configured, "build_model": build, "finalize_model_grads": finalize}
    with mock.patch.multiple(loop, **replaced), _installed(flags, {"schedule": schedule}) as args:
        loop.train(args)
        dropped = weakref.ref(configs.pop())
        loop.finalize_model_grads = finalize
        gc.collect()
        is_freed = dropped() is None
        loop.train(args)
        given = loop.finalize_model_grads
    return is_freed, configs[0].finalize_model_grads_func is given


@pytest.mark.parametrize(("flags", "schedule"), [(TWO, "zb-h1"), (CHUNKS, "zbv")])
def test_a_config_is_freed_or_gets_its_function_back(four_ranks: RankPool, flags: str, schedule: str) -> None:
    assert four_ranks.run(_collected, flags, schedule) == [(True, True)] * 4


FOUR = "--pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 32 --train-iters 5 --num-microbatches 8"
FOUR_CHUNKS = f"{FOUR} --virtual-pipeline-model-parallel-size 2"
SEARCH = "--zero-bubble-planning-seconds 0.1"


def _train(rank: int, flags: str) -> dict[str, Any]:
    """Train, and see what is planned: the peak before and after memory was measured, and the bytes that were measured."""
    with warnings_of_package() as warnings, installed(flags, by_flags=True, initializes=False) as args:
        history = example().train(args)
        loop = patches._installed()
        assert loop is not None
        (running,) = loop._models
        spec, plan = running.engine.schedule.spec, running.engine.schedule.plan(args.num_microbatches)
        assert running.engine.replanner is not None
        (memory, *_) = running.engine.replanner.memory[rank:]
        parameters = sum(parameter.numel() for chunk in running.chunks for parameter in chunk.parameters())
    return {
        "losses": [entry["losses"] for entry in history],
        "limit": spec.memory_limit,
        "peak": peak_memory(plan, CostModel.uniform(plan.placement))[rank],
        "state": memory.state_bytes,
        "parameters": parameters,
        "warnings": warnings,
    }


@pytest.mark.parametrize(("stock", "flags"), [(FOUR_CHUNKS, "--zero-bubble-v-schedule"), (FOUR, "--enable-zero-bubble")])
@pytest.mark.sampled(0.5, group="long loops")
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
