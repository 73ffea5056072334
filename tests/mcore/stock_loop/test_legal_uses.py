"""What loops do with megatron-core's schedules comes to the same, bit for bit, with a schedule installed.

Weights are drawn by name, each gradient is summed over the microbatches in their order, and gradients are not clipped, so nothing
is summed in another order. The baseline is megatron-core's 1F1B.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.timers import Timers
from torch import Tensor, nn

import megatron.zerobubble
from tests.support.loops import SIZES, Loop, forward_step, plain, with_loss
from tests.support.ranks import RankPool
from tests.support.stock import example, installed

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own: 33 uses that megatron-core's schedules allow (two models, two optimizers, frozen weights, "
    "accumulation over calls, skipped steps, `no_sync`, evaluations, other sizes each call, errors that are caught, timers, "
    "hooks, `uninstall`, ...): ZB-H1, interleaved ZB, ZBV",
    "works, bit for bit",
)


CHUNKS = {None: None, "zb-h1": None, "zbv": 2, "zb-interleaved": 2}
"""Model chunks per rank of each schedule; None is megatron-core's 1F1B."""

Start = Callable[..., Loop]
Use = Callable[[Start], Any]
USES: dict[str, Use] = {}


def run_use(rank: int, name: str, schedule: str | None) -> dict[str, Any]:
    """What a use comes to on one rank, by name."""
    chunks = CHUNKS[schedule]
    flags = "" if chunks is None else f"--virtual-pipeline-model-parallel-size {chunks}"
    loops: list[Loop] = []

    def start(more: str = "", **options: Any) -> Loop:
        loops.append(Loop(example().parse(f"{SIZES} {flags} {more}".split()), **options))
        return loops[-1]

    with installed(f"{SIZES} {flags}", schedule):
        returned = USES[name](start)
        found = {"returned": returned} if rank == 1 else {}
        for number, loop in enumerate(loops):
            found |= {f"{number} {key}": value for key, value in loop.state().items()}
            if rank == 1:
                found[f"{number} results"] = loop.seen
        loops.clear()
    return found


def use(function: Use) -> Use:
    USES[function.__name__] = function
    return function


def _do(loop: Loop, *steps: Callable[[Loop], object]) -> None:
    for step in steps:
        step(loop)


def _in_turn(first: Loop, second: Loop) -> None:
    for loop in (first, second, second, first):
        loop.train()


def _setting(name: str, value: Any) -> Callable[[Loop], None]:
    return lambda loop: setattr(loop.config, name, value)


def _freeze(chunk: nn.Module) -> None:
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("mlp.linear_fc1" not in name and "embedding" not in name)


def _frozen_from_now_on(loop: Loop) -> None:
    for chunk in loop.model:
        _freeze(chunk)


def _mean(losses: Tensor) -> Any:
    return losses.mean(), {"mean": losses.mean().detach(), "text": "as is", "number": 3}


def _ragged(losses: Tensor) -> Any:
    rows = [row[: 3 + number] for number, row in enumerate(losses.detach())]
    return losses.mean(), {"rows": torch.nested.nested_tensor(rows, layout=torch.jagged)}


def _no_loss(losses: Tensor, non_loss_data: bool = False) -> Any:
    assert non_loss_data
    return {"losses": losses, "rows": len(losses)}


class _Step:
    def __call__(self, data_iterator: Any, model: Any) -> Any:
        return forward_step(data_iterator, model)


TRAIN, EVALUATE = Loop.train, Loop.evaluate

USES |= {
    # models and weights
    "two_models_in_turn": lambda start: _in_turn(start(), start()),
    "a_model_built_again": lambda start: [_do(start(), TRAIN, EVALUATE) for _ in range(2)],
    "a_part_that_is_frozen": lambda start: _do(start(prepare=_freeze), TRAIN, TRAIN),
    "weights_frozen_and_trained_again": lambda start: _do(
        start(), TRAIN, _frozen_from_now_on, TRAIN, lambda loop: [weight.requires_grad_() for _, weight in loop.named()], TRAIN
    ),
    "a_bare_model_in_place_of_a_list": lambda start: _do(start(), lambda loop: loop.train(model=loop.one_or_list(loop.model))),
    # iterations
    "another_number_of_microbatches_each_call": lambda start: _do(
        start(), *(functools.partial(TRAIN, num_microbatches=number) for number in (4, 2, 6, 1, 3))
    ),
    "one_microbatch": lambda start: _do(start(), lambda loop: loop.train(1), lambda loop: loop.evaluate(1)),
    # forward passes only
    "evaluation_between_steps": lambda start: _do(start(), *[EVALUATE, TRAIN, lambda loop: loop.evaluate(5)] * 2),
    "evaluation_between_passes_and_step": lambda start: _do(start(), Loop.passes, EVALUATE, lambda loop: loop.optimizer.step()),
    "evaluation_with_gradients_enabled": lambda start: _do(start(), lambda loop: loop.passes(3, forward_only=True), TRAIN),
    "evaluation_of_a_model_with_dropout": lambda start: _do(start(hidden_dropout=0.5, attention_dropout=0.5), EVALUATE),
    "data_that_is_no_loss": lambda start: _do(
        start(), lambda loop: loop.evaluate(forward_step_func=with_loss(_no_loss), collect_non_loss_data=True), TRAIN
    ),
    "the_first_validation_step": lambda start: _do(
        start(), *(functools.partial(EVALUATE, first_val_step=is_first) for is_first in (True, False))
    ),
    # loss and callbacks
    "a_loss_function_with_two_results": lambda start: start().train(forward_step_func=with_loss(_mean)),
    "a_loss_function_that_returns_nested_tensors": lambda start: start().train(forward_step_func=with_loss(_ragged)),
    "a_loss_per_token": lambda start: _do(start("--calculate-per-token-loss"), TRAIN, lambda loop: loop.train(2)),
    "a_scale_of_the_loss": lambda start: _do(
        start(), _setting("grad_scale_func", lambda loss: loss * 4), TRAIN, _setting("grad_scale_func", None), TRAIN
    ),
    "a_callable_object_as_forward_step": lambda start: start().train(forward_step_func=_Step()),
    "an_error_in_the_last_microbatch_of_an_evaluation": lambda start: _failing(start(), at=2),
    "an_error_in_the_first_microbatch_of_an_evaluation": lambda start: _failing(start(), at=0),
    # configuration
    "outputs_that_are_deallocated": lambda start: _do(start(deallocate_pipeline_outputs=True), TRAIN, EVALUATE, TRAIN),
    "timers": lambda start: _do(start(), _setting("timers", Timers(2, "max")), TRAIN, EVALUATE),
}


@use
def an_optimizer_for_each_half_of_the_weights(start: Start) -> None:
    loop = start()
    halves = [[parameter for _, parameter in loop.named() if (parameter.dim() > 1) is is_matrix] for is_matrix in (True, False)]
    optimizers = [torch.optim.SGD(half, lr=lr, momentum=0.9) for half, lr in zip(halves, (0.1, 0.01), strict=True)]
    for _ in range(2):
        loop.zero()
        loop.passes()
        for half, optimizer in zip(halves, optimizers, strict=True):
            for parameter in half:
                parameter.grad = parameter.main_grad  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()


@use
def weights_saved_and_loaded(start: Start) -> None:
    loop = start()
    loop.train()
    saved = copy.deepcopy([chunk.state_dict() for chunk in loop.model])
    loop.train()
    for chunk, state in zip(loop.model, saved, strict=True):
        chunk.load_state_dict(state)
    loop.optimizer.reload_model_params()
    loop.train()


@use
def gradients_over_several_calls(start: Start) -> None:
    loop = start()
    for _ in range(2):
        loop.zero()
        for _ in range(3):
            loop.passes(2)
        loop.optimizer.step()


@use
def zero_grad_buffer_left_out_and_steps_that_are_skipped(start: Start) -> None:
    loop = start()
    for is_skipped in (False, True, True, False):
        loop.optimizer.zero_grad()
        loop.passes()
        if not is_skipped:
            loop.optimizer.step()
            loop.zero()


@use
def another_length_and_batch_each_call(start: Start) -> None:
    loop = start()
    for rows, length in ((2, 8), (1, 4), (3, 6)):
        data = [loop.batches(rows, length) for _ in loop.model]
        loop.train(data_iterator=loop.one_or_list(data), seq_length=length, micro_batch_size=rows)
        loop.evaluate(data_iterator=loop.one_or_list(data), seq_length=length, micro_batch_size=rows)


@use
def no_data_in_the_middle(start: Start) -> None:
    loop = start()
    numbers = range(len(loop.model)) if len(loop.model) > 1 else [None]
    ends = [
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
        for number in numbers
    ]

    def forward(data_iterator: Any, model: Any) -> Any:
        return (model(None, None, None), None) if data_iterator is None else forward_step(data_iterator, model)

    data = [each if is_end else None for each, is_end in zip(loop.data, ends, strict=True)]
    for _ in range(2):
        loop.train(forward_step_func=forward, data_iterator=loop.one_or_list(data))


def _failing(loop: Loop, *, at: int) -> list[str]:
    """The loss function fails, the loop catches it and goes on. What was raised on this rank."""
    counted, caught = [], []

    def failing(losses: Tensor) -> Any:
        counted.append(losses)
        if len(counted) == at + 1:
            raise FloatingPointError("no loss")
        return example().loss_function(losses)

    loop.train()
    try:
        loop.evaluate(3, forward_step_func=with_loss(failing))
    except FloatingPointError as error:
        caught.append(str(error))
    for chunk in loop.model:
        chunk.train()
    loop.train()
    loop.evaluate()
    return caught


@use
def no_sync_around_calls(start: Start) -> None:
    loop = start("--overlap-grad-reduce")
    loop.overlap_reductions(is_aligned=False)
    loop.zero()
    with contextlib.ExitStack() as stack:
        for chunk in loop.model:
            stack.enter_context(chunk.no_sync())
        loop.passes(forward_only=True)
    loop.passes()
    loop.optimizer.step()


@use
def reductions_that_overlap(start: Start) -> None:
    loop = start("--overlap-grad-reduce --use-distributed-optimizer")
    loop.overlap_reductions(is_aligned=False)
    for is_aligned in (True, False):
        functions = [chunk.start_grad_sync for chunk in loop.model]
        loop.config.grad_sync_func = loop.one_or_list(functions) if is_aligned else None
        loop.train()


@use
def weights_that_are_gathered_during_forward_passes(start: Start) -> None:
    gathering = functools.partial(DistributedDataParallelConfig, overlap_param_gather=True)
    with mock.patch.object(example(), "DistributedDataParallelConfig", gathering):
        loop = start("--overlap-grad-reduce --use-distributed-optimizer", optimizer={"overlap_param_gather": True})
    loop.overlap_reductions(is_aligned=False)
    for is_aligned in (True, False, True):
        functions = [chunk.start_param_sync for chunk in loop.model]
        loop.config.param_sync_func = loop.one_or_list(functions) if is_aligned else None
        loop.train()


@use
def hooks_on_layers(start: Start) -> None:
    loop = start()
    passed: dict[str, list[Any]] = {}

    def add(layer: Any) -> None:
        def forward(module: Any, given: Any, output: Any) -> None:
            passed.setdefault(f"output of {layer.layer_number}", []).append(plain(output[0]))

        def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
            passed.setdefault(f"gradient of {layer.layer_number}", []).append(plain(grad_output[0]))

        layer.register_forward_hook(forward)
        layer.register_full_backward_hook(backward)

    for chunk in loop.model:
        for layer in chunk.module.decoder.layers:
            add(layer)
    loop.train()
    loop.state = lambda: passed  # type: ignore[method-assign]


@use
def stock_after_uninstall(start: Start) -> None:
    loop = start()
    loop.train()
    megatron.zerobubble.uninstall()
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    loop.model = [DistributedDataParallel(loop.config, ddp_config, chunk.module) for chunk in loop.model]
    loop.adopt_optimizer()
    loop.train()


# -- the tests ------------------------------------------------------------------------------------------------------------

_SCHEDULES = [schedule for schedule in CHUNKS if schedule is not None]
_LEFT_OUT = {
    ("stock_after_uninstall", "zbv"): "after uninstall stages that sit in a V stay there, and only a V schedule runs them",
}
"""Uses that are not legal under a schedule, with the page that says so."""
_BASELINES = {"an_error_in_the_first_microbatch_of_an_evaluation": "an_error_in_the_last_microbatch_of_an_evaluation"}
"""Uses that stock cannot go on from: it leaves messages of the failed call behind, which other ranks wait for."""


def _all_ranks(ranks: RankPool, name: str, schedule: str | None) -> dict[str, Any]:
    """What a use comes to."""
    first, second = ranks.run(run_use, name, schedule)
    assert not first.keys() & second.keys()
    return first | second


_under_1f1b = functools.cache(functools.partial(_all_ranks, schedule=None))


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("schedule", _SCHEDULES)
@pytest.mark.sampled(0.12)
def test_a_legal_use_comes_to_the_same_as_under_1f1b(two_ranks: RankPool, name: str, schedule: str) -> None:
    if (name, schedule) in _LEFT_OUT:
        pytest.skip(_LEFT_OUT[name, schedule])
    np.testing.assert_equal(_all_ranks(two_ranks, name, schedule), _under_1f1b(two_ranks, _BASELINES.get(name, name)))
