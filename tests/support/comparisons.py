"""Comparisons of a run through a schedule with the unpipelined one, and what else is asked of a rank's trainer.

Everything here runs inside the ranks of a `RankPool`, with the trainers of `tests.support.gpt`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.zerobubble.errors import ConfigError, ZeroBubbleError
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.timeline import Timeline
from tests.support.after_each_op import after_each_op
from tests.support.gpt import Case, Outcome, Tensors


@functools.lru_cache(maxsize=4)
def unpipelined(case: Case) -> tuple[Tensors, Outcome]:
    """Initial weights and outcome of `case`, which has no pipeline. Kept: many schedules are compared with one reference."""
    reference = case.trainer()
    initial = reference.snapshot()
    outcome = reference.train()
    reference.close()
    return initial, outcome


@dataclass(frozen=True)
class Difference:
    """Differences between a rank's part of a pipelined run and the unpipelined one. Exactly 0 if the bits are the same."""

    losses: float
    num_losses: int
    """Losses this rank reported in the first step; 0 where the last stage is not."""
    gradients: float
    """Largest difference of a gradient of the first step, relative to the tensor's largest entry (`_largest`)."""
    gradient_name: str
    unequal: tuple[str, ...]
    """Parameters whose gradients of the first step have other bits."""
    weights: float
    """The same for the weights after the last step."""
    weight_name: str
    grad_norms: float
    names: tuple[str, ...]
    """Parameters this rank holds, by their unpipelined names."""


def compare(rank: int, case: Case, reference: Case | None = None) -> Difference:
    """Train `reference` (by default the unpipelined model) and `case` on this rank; returns their differences."""
    initial, expected = unpipelined(case.unpipelined if reference is None else reference)
    trainer = case.trainer(initial)
    actual = trainer.train()
    trainer.close()
    return difference(actual, expected)


def difference(actual: Outcome, expected: Outcome) -> Difference:
    """Differences between a rank's outcome and that of the unpipelined model."""
    gradients, gradient_name = _largest(actual.gradients, expected.gradients)
    weights, weight_name = _largest(actual.weights, expected.weights)
    pairs = [(a, b) for x, y in zip(actual.losses, expected.losses, strict=True) for a, b in zip(x, y, strict=False)]
    norms = zip(actual.grad_norms, expected.grad_norms, strict=True)
    return Difference(
        losses=max((abs(a - b) if math.isfinite(a) else math.inf for a, b in pairs), default=0.0),
        num_losses=len(actual.losses[0]),
        gradients=gradients,
        gradient_name=gradient_name,
        unequal=tuple(name for name, tensor in actual.gradients.items() if not torch.equal(tensor, expected.gradients[name])),
        weights=weights,
        weight_name=weight_name,
        grad_norms=max(abs(a - b) / (b or 1.0) for a, b in norms),
        names=tuple(actual.weights),
    )


def message_of(rank: int, function: Callable[..., Any], *args: Any) -> str:
    """The message of the `ConfigError` in which `function(rank, *args)` ends."""
    with pytest.raises(ConfigError) as caught:
        function(rank, *args)
    return str(caught.value)


def refusal(rank: int, case: Case) -> str:
    """Why the case is refused when it is built."""
    return message_of(rank, lambda _: case.trainer())


def record(rank: int, case: Case) -> Timeline:
    """The second iteration."""
    trainer = case.trainer()
    trainer.schedule.recordings.choose([2])
    trainer.train()
    (timeline,) = trainer.schedule.timelines()
    trainer.close()
    return timeline


def grown_by_op(rank: int, case: Case) -> list[tuple[str, set[str]]]:
    """The kind of each op of this rank, and the parameters whose gradients have changed in it."""
    trainer = case.trainer()
    weights = dict(trainer.parameters())
    before, grown = dict.fromkeys(weights, 0.0), []

    def observe(_: Any, op: Op) -> None:
        now = {name: float(weight.main_grad.double().abs().sum()) for name, weight in weights.items()}
        grown.append((op.kind.name, {name for name in weights if now[name] != before[name]}))
        before.update(now)

    after_each_op(trainer.schedule, observe)
    trainer.zero_gradients()
    trainer.forward_backward(0)
    weights.clear()
    trainer.close()
    return grown


def error_of(trainer: Any, step: int = 0) -> str:
    """Kind and text of the error of this rank in a step, after which the trainer is closed; nothing if there is none."""
    try:
        trainer.forward_backward(step)
    except ZeroBubbleError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    return ""


def assert_near(differences: Sequence[Difference], case: Case, tolerance: float = 0.0) -> None:
    """Assert that no rank is further than `tolerance` from the unpipelined run, or ten times that for losses; 0: the same bits.

    With the distributed optimizer a rank's gradient buffer holds garbage outside of its own shard, and is not compared.
    """
    for rank, found in enumerate(differences):
        assert found.losses <= 10 * tolerance, (rank, found)
        assert found.gradients <= tolerance or case.distributed_optimizer, (rank, found)
        assert found.weights <= tolerance, (rank, found)


def assert_same_bits(differences: Sequence[Difference], case: Case) -> None:
    """Assert the same bits, that the ranks have all layers, and that only those with the last stage report losses."""
    assert_near(differences, case)
    layers = {name.split(".")[2] for found in differences for name in found.names if ".layers." in name}
    assert layers == set(map(str, range(case.num_layers)))
    reporting = [found.num_losses for found in differences if found.num_losses]
    assert reporting == [case.num_microbatches] * (4 // case.num_ranks)


def _largest(actual: Tensors, expected: Tensors) -> tuple[float, str]:
    """Relative to the tensor's largest entry, or to its dtype's smallest normal number where that is larger.

    Below it the last bit is worth the same everywhere; in float16 a quarter of a bias that has taken a few steps from zero.
    """
    worst = (0.0, "")
    for name, tensor in actual.items():
        if not torch.equal(tensor, expected[name]):
            scale = max(float(expected[name].abs().max()), torch.finfo(tensor.dtype).smallest_normal)
            largest = float((tensor - expected[name]).abs().max()) / scale
            worst = max(worst, (math.inf if math.isnan(largest) else largest, name))
    return worst
