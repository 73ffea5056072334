"""Post-validation in a loop that knows nothing of it: steps are redone as if the loop had not gone on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.iteration_runner import IterationHooks
from megatron.zerobubble.mcore.stock_loop.optimistic_steps import OptimisticSteps
from tests.support.loops import train_optimistically
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER, after_steps

pytestmark = pytest.mark.claims(
    "Your own script",
    "in a loop of your own: post-validation with clipping, a learning rate that changes, an evaluation and a checkpoint "
    "between a step and its validation; fp32, bf16, fp16 whose loss scale overflows, distributed optimizer; forward steps that "
    "pop keys of their batches, change tensors of them in place, and assign registered buffers",
    "works, bit for bit",
)

MODEL = "--num-layers 4 --hidden-size 32 --train-iters 6 --pipeline-model-parallel-size"
TWO, FOUR, CHUNKS = f"{MODEL} 2", f"{MODEL} 4", f"{MODEL} 2 --virtual-pipeline-model-parallel-size 2"
OPTIMISTIC = "--enable-optimizer-post-validation --post-validation-patience"
CLIP, LR = 1.14, 1e-3
LOOSE, MIXED = "--clip-grad 1000", f"--clip-grad {CLIP}"
"""Never clips; clips some of the steps."""


def _run(four_ranks: RankPool, flags: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = four_ranks.run(train_optimistically, flags, 3, 4)
    return results


def _differences(results: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """Largest differences of losses, weights that were saved, and weights and buffers at the end."""
    largest = [0.0, 0.0, 0.0]
    for one, other in zip(results, others, strict=True):
        pairs = [
            (a, b) for left, right in zip(one["losses"], other["losses"], strict=True) for a, b in zip(left, right, strict=True)
        ]
        largest[0] = max([largest[0], *(abs(a - b) for a, b in pairs)])
        for place, what in enumerate(("saved", "weights"), 1):
            assert set(one[what]) == set(other[what])
            found = [float((value - other[what][name]).abs().max()) for name, value in one[what].items() if value.numel()]
            largest[place] = max(largest[place], *found)
    return largest


@pytest.mark.parametrize(
    ("stock", "schedule"),
    [
        (f"{FOUR} --tie-embeddings-and-output-weights", "--zero-bubble-max-pending-backward 2p"),
        (f"{TWO} --bf16 --use-distributed-optimizer --overlap-grad-reduce", "--enable-zero-bubble"),
        (CHUNKS, "--zero-bubble-v-schedule"),
    ],
    ids=["zb-h2-tied", "zb-h1-bf16-distributed", "zbv"],
)
@pytest.mark.sampled(0.33)
def test_steps_are_those_of_the_synchronous_optimizer(four_ranks: RankPool, stock: str, schedule: str) -> None:
    """Not clipped: bit for bit megatron-core's own steps, and none is redone. Clipped: steps that are redone at every chance have
    the bits of those that wait after the first one (patience); megatron-core adds the norm's squares in another order."""
    synchronous, optimistic = (_run(four_ranks, f"{stock} {LOOSE} {schedule} {more}") for more in ("", f"{OPTIMISTIC} 0"))
    assert _differences(synchronous, optimistic) == [0.0, 0.0, 0.0]
    assert {step for result in optimistic for step in result["redone"]} == {False}

    every, first = (_run(four_ranks, f"{stock} {MIXED} {schedule} {OPTIMISTIC} {patience}") for patience in (0, 100))
    assert _differences(every, first) == [0.0, 0.0, 0.0]
    for result, expected in zip(every, first, strict=True):
        assert result["norms"] == expected["norms"]
        is_clipped = [norm > CLIP for norm in result["norms"]]
        assert result["redone"] == is_clipped
        assert {*is_clipped} == {True, False}
        assert expected["redone"] == is_clipped[: is_clipped.index(True) + 1]
    if "--bf16" not in stock:  # there a last digit of the norm can be a step of a rounded weight
        synchronous = _run(four_ranks, f"{stock} {MIXED} {schedule}")
        losses, *weights = _differences(synchronous, every)
        assert losses < 4 * after_steps(6, LR), "of a loss of about 4"
        assert max(weights) < 6 * LR * 0.01, "a gradient that is rounding alone is below a hundredth of Adam's epsilon"


@pytest.mark.parametrize("distributed", ["", "--use-distributed-optimizer --overlap-grad-reduce"], ids=["plain", "distributed"])
@pytest.mark.parametrize(
    ("stock", "schedule"), [(TWO, "--enable-zero-bubble"), (CHUNKS, "--zero-bubble-v-schedule")], ids=["zb-h1", "zbv"]
)
@pytest.mark.sampled(0.5)
def test_a_skipped_step_is_as_if_the_loop_had_known(four_ranks: RankPool, stock: str, schedule: str, distributed: str) -> None:
    """Overflows on all ranks, whose loss scale begins too large, and on the last one alone, when another has taken its step: that
    of 4 is validated by reading weights, that of 8 behind forwards, which run again, that of 12 at the end."""
    flags, overflows = f"{stock} {schedule} {distributed} --fp16 --train-iters 12", (4, 8, 12)
    synchronous, optimistic = (
        four_ranks.run(train_optimistically, f"{flags} {more}", 3, 4, overflows) for more in ("", f"{OPTIMISTIC} 0")
    )
    assert _differences(synchronous, optimistic) == [0.0, 0.0, 0.0]
    for result, expected in zip(optimistic, synchronous, strict=True):
        assert result["steps"] == expected["steps"]  # learning rates and loss scales
        assert result["norms"] == pytest.approx(expected["norms"], rel=OTHER_ORDER)  # squares are added in another order
        skipped = [norm < 0 for norm in result["norms"]]
        assert skipped == result["redone"]
        assert result["advanced"] == expected["advanced"] == skipped.count(False)
        assert sum(skipped) > len(overflows)
    assert {number for result in optimistic for number in result["rolled back"]} == {*overflows}


class _Scaled:
    """Stands for a part of an optimizer with loss scaling."""

    grad_scaler = object()

    def __init__(self) -> None:
        self.param_groups = [{"params": [], "lr": 0.1, "weight_decay": 0.01}]


def test_an_optimizer_whose_step_cannot_be_split_is_named() -> None:
    schedule = SimpleNamespace(hooks=IterationHooks())
    steps = OptimisticSteps(ZeroBubbleConfig(), schedule, [torch.nn.Linear(1, 1)])  # type: ignore[arg-type]
    assert schedule.hooks.before_gradients is not None
    with pytest.raises(ConfigError, match="cannot split the step of a _Scaled"):
        steps.step(_Scaled())
    steps.close()


def test_a_scheduler_that_cannot_be_taken_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "megatron.zerobubble.mcore.stock_loop.optimistic_steps"
    monkeypatch.setattr(f"{module}._KINDS", (_Scaled,))
    unvalidated = SimpleNamespace(step=lambda: None, is_unvalidated=True, known=None, validate=lambda: None)
    monkeypatch.setattr(f"{module}.post_validation", lambda *_, **__: unvalidated)
    steps = OptimisticSteps(ZeroBubbleConfig(), SimpleNamespace(hooks=IterationHooks()), [])  # type: ignore[arg-type]
    optimizer = _Scaled()
    assert steps.step(optimizer) == (True, None, None)
    steps.flush()  # nothing has changed
    steps.step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    steps.advanced(SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{}])), 1)  # of another optimizer
    with pytest.raises(ConfigError, match=r"lr changed from 0\.1 to 0\.2 by something other than megatron-core's"):
        steps.flush()
