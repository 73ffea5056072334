"""Training steps of megatron-core's DDP and optimizers on the fake NCCL, every torch op traced."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zerobubble.plan.registry import known_schedules
from tests.optimizer.support import BASE, Scenario
from tests.optimizer.support import compare as compare_optimistic
from tests.support.fake_nccl.communicators import Communicator
from tests.support.fake_nccl.megatron import run_megatron
from tests.support.fake_nccl.tracing import TracedOps
from tests.support.gpt import Case, Outcome

STEPS = 2
CHUNKS = {info.name: info.default_num_chunks for info in known_schedules()}
OVERLAPPED = Case(
    *("zb-h2", 2, 5),
    num_layers=4,
    distributed_optimizer=True,
    overlap_grad_reduce=True,
    different_data=True,
    adam_eps=1.0,
    clip_grad=0.5,
    num_steps=STEPS,
)
OVERLAPPED_V = replace(OVERLAPPED, schedule="zbv", num_chunks=2, overlap_param_gather=True)


def train(rank: int, case: Case) -> Outcome:
    trainer = case.trainer()
    with TracedOps():
        outcome = trainer.train()
    trainer.close()
    return outcome


def _case_of(name: str) -> Case:
    return Case(name, 2, 4, num_chunks=CHUNKS[name], num_layers=max(4, 2 * CHUNKS[name]), num_steps=STEPS)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("case", [*map(_case_of, CHUNKS), OVERLAPPED, OVERLAPPED_V], ids=str)
@pytest.mark.sampled(0.06)
def test_every_schedule_trains_the_same_in_every_order(case: Case, seed: int) -> None:
    """Two pipeline ranks, and two replicas where reductions overlap; the bits do not depend on what is late."""
    size = 2 * (1 + case.distributed_optimizer)
    first, second = (run_megatron(size, train, case, seed=3 * seed + lateness) for lateness in (1, 2))
    for ours, theirs in zip(first, second, strict=True):
        assert ours.losses == theirs.losses
        assert ours.grad_norms == theirs.grad_norms
        assert all(torch.equal(weight, theirs.weights[name]) for name, weight in ours.weights.items())


def test_nothing_is_connected_inside_passes() -> None:
    """Each collective's algorithm has been used before, at the size that passes have."""
    inside, connect = [], Communicator.connect

    def watched(self: Communicator, place: int, kind: str, tensors: Any) -> None:
        before = len(self._connected)
        connect(self, place, kind, tensors)
        if len(self._connected) > before and any(frame.filename.endswith("executor.py") for frame in inspect.stack(0)):
            inside.append((self.name, kind))

    with mock.patch.object(Communicator, "connect", watched):
        run_megatron(4, train, OVERLAPPED, seed=0)
    assert inside == []


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
    for rank, (differences, redone, _) in enumerate(run_megatron(size, compare_optimistic, scenario, seed=1)):
        assert differences == [], rank
        assert tuple(redone) == scenario.redone, rank
