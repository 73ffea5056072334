"""What loops do with weights and gradients between an optimizer step and its validation, with post-validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron.zerobubble
from megatron.zerobubble.errors import ExecutionError
from tests.support.loops import SIZES, Loop, merged, plain
from tests.support.ranks import RankPool
from tests.support.stock import installed, warnings_of_package

pytestmark = pytest.mark.claims(
    "Your own script",
    "post-validation in a loop of your own that reads weights by name behind every step, moves weights and gradients away and "
    "back, or changes weights, after `megatron.zerobubble.settle()`; ZB-H1, ZBV, distributed optimizer",
    "works, within 1e-5; without the call an error, or a warning for reading",
)

CHUNKS = "--virtual-pipeline-model-parallel-size 2 --zero-bubble-v-schedule"
SCHEDULES = pytest.mark.parametrize("schedule", ["--enable-zero-bubble", CHUNKS], ids=["zb-h1", "zbv"])
OPTIMIZERS = pytest.mark.parametrize("more", ["", "--use-distributed-optimizer"], ids=["plain", "distributed"])
OPTIMISTIC = "--enable-optimizer-post-validation --post-validation-patience 0"
CLIPPED, LOOSE = f"{SIZES} --clip-grad 0.05", f"{SIZES} --clip-grad 1000"
"""Clips every step; none."""

BETWEEN: dict[str, Callable[[Loop], None]] = {}


def between(function: Callable[[Loop], None]) -> Callable[[Loop], None]:
    """Add something that a loop does between two iterations to the list."""
    BETWEEN[function.__name__] = function
    return function


@between
def nothing(loop: Loop) -> None:
    """Weights are read by name, as at each step."""


def _buffers(loop: Loop) -> list[Any]:
    return [buffer for chunk in loop.model for buffer in chunk.buffers]


@between
def storages_are_freed_and_come_back(loop: Loop) -> None:
    """As RL frameworks share a GPU with inference: gradients come back as zeros, weights from a copy."""
    moved: list[Tensor] = []
    for buffer in _buffers(loop):
        storage = buffer.grad_data.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        moved.append(torch.full((1 << 12,), torch.nan))  # in the way of the same address
        storage.resize_(size)
        buffer.grad_data.zero_()
        if buffer.param_data is not None:
            copy, storage = buffer.param_data.clone(), buffer.param_data.untyped_storage()
            storage.resize_(0)
            storage.resize_(copy.untyped_storage().nbytes())
            buffer.param_data.copy_(copy)


@between
def gradients_are_zeroed_by_hand(loop: Loop) -> None:
    for _, weight in loop.named():
        weight.main_grad.zero_()  # type: ignore[attr-defined]


@between
def weights_are_clamped(loop: Loop) -> None:
    with torch.no_grad():
        for part in loop.optimizer.chained_optimizers:
            for weight in part.get_parameters():
                weight.clamp_(-0.03, 0.03)
    for chunk in loop.model:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


@between
def buffers_of_gradients_are_offloaded_by_megatron_core(loop: Loop) -> None:
    for chunk in loop.model:
        chunk.offload_grad_buffers(empty_cache=False)
    for chunk in loop.model:
        chunk.restore_grad_buffers()


def train(rank: int, flags: str, name: str, settles: bool = True) -> dict[str, Any]:
    """Four iterations: results on one rank, and weights by name behind each step; the error where there is one."""
    with installed(flags, by_flags="zero-bubble" in flags) as args, warnings_of_package() as warned:
        loop = Loop(args)
        found: dict[str, Any] = {}
        try:
            for step in range(4):
                loop.zero()
                loop.passes()
                loop.optimizer.step()
                if settles:
                    megatron.zerobubble.settle()
                    found |= {f"{step} {key}": plain(weight) for key, weight in loop.named()}
                BETWEEN[name](loop)
        except ExecutionError as error:
            return {"error": str(error), "step": step}
        assert not warned
        return {"results": loop.seen, **found}


def _compare(ranks: RankPool, flags: str, schedule: str, name: str, *, settles: bool) -> None:
    """The baseline is megatron-core's 1F1B; its gradient norm is summed in single precision and in another order."""
    expected = merged(ranks.run(train, flags, name))
    actual = merged(ranks.run(train, f"{flags} {schedule} {OPTIMISTIC}", name, settles))
    if settles:
        assert actual.keys() == expected.keys()
    for key in actual.keys() - {"results"}:
        assert actual[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), key
    losses = [
        [float(report["lm loss"]) for rank in found["results"] for reports in rank for report in reports]
        for found in (actual, expected)
    ]
    assert losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@SCHEDULES
@OPTIMIZERS
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.sampled(0.15)
def test_a_settled_step_is_that_of_the_synchronous_optimizer(four_ranks: RankPool, schedule: str, more: str, name: str) -> None:
    _compare(four_ranks, f"{CLIPPED} {more}", schedule, name, settles=True)


@SCHEDULES
@pytest.mark.sampled(0.5)
def test_megatron_cores_own_offloading_validates(four_ranks: RankPool, schedule: str) -> None:
    _compare(four_ranks, CLIPPED, schedule, "buffers_of_gradients_are_offloaded_by_megatron_core", settles=False)


@SCHEDULES
@OPTIMIZERS
@pytest.mark.parametrize(
    ("name", "what", "clip"),
    [
        ("storages_are_freed_and_come_back", "gradients", CLIPPED),
        ("storages_are_freed_and_come_back", "gradients", LOOSE),
        ("gradients_are_zeroed_by_hand", "gradients", LOOSE),
        ("weights_are_clamped", "weights", LOOSE),
    ],
)
@pytest.mark.sampled(0.25)
def test_what_a_step_needs_must_not_change_before(
    four_ranks: RankPool, schedule: str, more: str, name: str, what: str, clip: str
) -> None:
    """Said on every rank in the second iteration, whether or not a step has to be redone."""
    for found in four_ranks.run(train, f"{clip} {more} {schedule} {OPTIMISTIC}", name, False):
        assert found["step"] == 1
        assert f"something moved or changed {what}, which post-validation needs" in found["error"]
        assert "megatron.zerobubble.settle() right after optimizer.step()" in found["error"]


def test_steps_that_are_never_redone_need_nothing(two_ranks: RankPool) -> None:
    """Without clipping and loss scaling."""
    _compare(two_ranks, SIZES, "--enable-zero-bubble", "storages_are_freed_and_come_back", settles=False)


def _untouched(rank: int, flags: str) -> tuple[list[Any], list[str]]:
    """What the first step returns, and the warning for weights that are read by name, once, before it is validated."""
    with installed(flags, by_flags="zero-bubble" in flags) as args, warnings_of_package() as warned:
        loop = Loop(args)
        loop.train()
        loop.passes()
        list(loop.model[0].named_parameters())  # behind the validation
        assert not any("settle" in each for each in warned)
        outcome = loop.optimizer.step()
        for _ in range(2):
            next(loop.model[-1].module.parameters())
        return [each if each is None else bool(each) for each in outcome], [each for each in warned if "settle()" in each]


def test_reading_parameters_of_an_unvalidated_step_is_warned_of_once(two_ranks: RankPool) -> None:
    optimistic, stock = (two_ranks.run(_untouched, f"{LOOSE} {more}") for more in (f"--enable-zero-bubble {OPTIMISTIC}", ""))
    for _, warned in optimistic:
        (line,) = warned
        assert "parameters were asked for behind an optimizer step that is not validated yet" in line
    assert [warned for _, warned in stock] == [[], []]
    assert optimistic[-1][0] == stock[-1][0] == [True, True, None], "zeros of gradients that nobody counts"


def _memory_that_comes_back(rank: int, flags: str) -> str:
    """Content is lost, at the same address: as an allocator does that unmaps memory."""
    with installed(flags, by_flags=True) as args:
        loop = Loop(args)
        loop.train()
        for buffer in _buffers(loop):
            buffer.grad_data.data.zero_()
        try:
            loop.train()
        except ExecutionError as error:
            return str(error)
        return ""


def test_gradients_are_compared_before_they_are_used_again(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_memory_that_comes_back, f"{CLIPPED} --enable-zero-bubble {OPTIMISTIC}"):
        assert "something moved or changed gradients" in found
