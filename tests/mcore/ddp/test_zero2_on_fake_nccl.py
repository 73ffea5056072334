"""Real training steps on the fake NCCL: sharded gradients, DDP's own reductions and gathers, and the pipeline's transfers.

Every torch op is an access of the compute stream, every collective one of its communicator's. So what a reduction or a gather
reads or writes too early or too late is found, in our code and in megatron-core's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zerobubble.mcore.ddp import zero2
from megatron.zerobubble.plan.registry import known_schedules
from tests.optimizer.support import BASE, Scenario
from tests.optimizer.support import compare as compare_optimistic
from tests.support.fake_nccl.engine import FakeNcclError
from tests.support.fake_nccl.megatron import run_megatron
from tests.support.fake_nccl.tracing import TracedOps
from tests.support.gpt import Case, Outcome

STEPS = 2
CHUNKS = {info.name: info.default_num_chunks for info in known_schedules()}
ZERO1 = Case(
    *("zb-h2", 2, 5),
    num_layers=4,
    distributed_optimizer=True,
    overlap_grad_reduce=True,
    different_data=True,
    adam_eps=1.0,
    clip_grad=0.5,
    num_steps=STEPS,
)
ZERO1_V = replace(ZERO1, schedule="zbv", num_chunks=2, overlap_param_gather=True)


def train(rank: int, case: Case) -> Outcome:
    trainer = case.trainer()
    with TracedOps():
        outcome = trainer.train()
    trainer.close()
    return outcome


def apart(case: Case, group_size: int, seed: int) -> float:
    """How far weights with sharded gradients are from ZeRO-1's, relative to a tensor's largest entry."""
    expected = run_megatron(4, train, case, seed=seed)
    actual = run_megatron(4, train, replace(case, shard_gradients=group_size), seed=seed)
    worst = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.losses[0] == theirs.losses[0]
        for name, weight in theirs.weights.items():
            worst = max(worst, float((ours.weights[name] - weight).abs().max() / (weight.abs().max() or 1.0)))
    return worst


@pytest.mark.parametrize(("case", "group_size", "tolerance"), [(ZERO1, 5, 0.0), (ZERO1_V, 2, 1e-6)], ids=str)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.sampled(0.15)
def test_sharded_gradients_train_as_zero1(case: Case, group_size: int, tolerance: float, seed: int) -> None:
    assert apart(case, group_size, seed) <= tolerance


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("name", list(CHUNKS))
@pytest.mark.sampled(0.03)
def test_every_schedule_trains_the_same_in_every_order(name: str, seed: int) -> None:
    """Two pipeline ranks; the bits do not depend on what is late."""
    layers = max(4, 2 * CHUNKS[name])
    case = Case(name, 2, 4, num_chunks=CHUNKS[name], num_layers=layers, num_steps=STEPS)
    first, second = (run_megatron(2, train, case, seed=3 * seed + lateness) for lateness in (1, 2))
    for ours, theirs in zip(first, second, strict=True):
        assert ours.losses == theirs.losses
        assert ours.grad_norms == theirs.grad_norms
        assert all(torch.equal(weight, theirs.weights[name]) for name, weight in ours.weights.items())


def _add_without_waiting(self: Any) -> None:
    self.bucket.shard.add_(self.part)


def _keep_nothing(self: Any, bucket: Any, full: Any, part: Any, handle: Any) -> None:
    self.bucket, self.full, self.part, self.handle = bucket, torch.empty(0), torch.zeros_like(part), handle


@pytest.mark.parametrize(("name", "broken"), [("finish", _add_without_waiting), ("__init__", _keep_nothing)])
def test_a_reduction_that_breaks_a_rule_is_noticed(name: str, broken: Any) -> None:
    with mock.patch.object(zero2._Reduction, name, broken):
        for seed in range(3):
            with pytest.raises(FakeNcclError, match=r"reduce-scatter \d+ of communicator"):
                run_megatron(4, train, replace(ZERO1, shard_gradients=2), seed=seed)


SCENARIO = Scenario("clipped", replace(BASE, dropout=0.0), spikes={(3, 0): 1e4, (4, 1): 1e5, (11, 1): 1e4}, redone=(3, 4, 11))


@pytest.mark.parametrize(
    "case",
    [
        SCENARIO.case,
        pytest.param(replace(BASE, schedule="zbv", num_chunks=2), marks=pytest.mark.slow),
        pytest.param(replace(BASE, distributed_optimizer=True, overlap_grad_reduce=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.sampled(0.33)
def test_optimistic_steps_of_megatron_cores_optimizer_equal_synchronous_ones(case: Case) -> None:
    """Twelve iterations, with rollbacks, through `mcore.post_validation`."""
    scenario = replace(SCENARIO, case=case)
    size = 4 if case.distributed_optimizer else 2
    for rank, (differences, redone, _, _) in enumerate(run_megatron(size, compare_optimistic, scenario, seed=1)):
        assert differences == [], rank
        assert tuple(redone) == scenario.redone, rank
