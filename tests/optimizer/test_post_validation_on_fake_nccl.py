"""Post-validation on the fake NCCL and its host-side groups: late statistics, rewinds in mid-flight, and the same weights.

The first ops of the next iteration run before the last step is validated, with receives of its messages under way; the statistics
travel through host memory meanwhile. The optimizer is a number per rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.zerobubble.optimizer.post_validation import GradientStatistics, PostValidation, Relay
from megatron.zerobubble.plan.communication import place_communication, speculative_forwards
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from tests.runtime.on_fake_nccl import CPU, ArenaWork, Hazard, injector
from tests.support.fake_nccl.device import Device
from tests.support.fake_nccl.engine import FakeNcclError
from tests.support.fake_nccl.ranks import run_ranks
from tests.support.programs import FAMILIES

ITERATIONS = 6
CLIP = 10.0


class _Number:
    """A `RollbackOptimizer` over one weight, whose gradients are small, large or infinite at random."""

    def __init__(self, rank: int, seed: int) -> None:
        self._random = random.Random(f"{seed} {rank}")
        self.weight = 1.0
        self._gradient = 0.0
        self._saved: float | None = None

    def prepare(self) -> GradientStatistics:
        self._gradient = self._random.choice((1.0, 2.0, 2.0, 3.0, 50.0, float("inf")))
        is_finite = self._gradient != float("inf")
        return GradientStatistics((self._gradient**2 if is_finite else 0.0,), (0.0 if is_finite else 1.0,))

    def is_clipped(self, statistics: GradientStatistics) -> bool:
        return statistics.norm > CLIP

    def apply(self, statistics: GradientStatistics) -> None:
        if not statistics.overflowed:
            self.weight -= 0.01 * self._gradient * min(1.0, CLIP / statistics.norm)

    def snapshot(self) -> bool:
        self._saved = self.weight
        return True

    def redo(self, statistics: GradientStatistics, *, roll_back: bool) -> None:
        if roll_back:
            assert self._saved is not None
            self.weight = self._saved
        self.apply(statistics)

    def drop_snapshot(self) -> None:
        self._saved = None

    def finalize(self, statistics: GradientStatistics) -> None:
        """No loss scale."""

    def closers(self) -> tuple[()]:
        """No groups."""
        return ()


def train(rank: int, name: str, p: int, seed: int, optimistic: bool, hazard: Hazard) -> tuple[float, int, list[float]]:
    """The weight, the number of steps that were redone, and the norm of each step."""
    plan = build_plan(name, num_ranks=p, num_microbatches=4)
    program = place_communication(plan, fence=speculative_forwards(plan) if optimistic else ())
    device = Device.current()
    links = ProcessGroupLinks(plan.placement, pipeline=range(p), rank=rank, device=CPU)
    relay = Relay(range(p), rank)
    optimizer = _Number(rank, seed)
    steps = PostValidation(optimizer, relay, optimistic=optimistic, patience=0)
    work = ArenaWork(program, device, injector(hazard, rank, program, seed, device))
    redone, norms = 0, []
    for _ in range(ITERATIONS):
        executor = Executor(program, rank, links, work)
        executor.begin(program.fence[rank])
        verdict = steps.validate()
        if verdict is not None:
            norms.append(verdict.norm)
            if verdict.is_redone:
                redone += 1
                executor.abandon(program.unread(rank))
                executor = Executor(program, rank, links, work)
        executor.run()
        steps.step()
    verdict = steps.flush()
    assert verdict is not None
    norms.append(verdict.norm)
    links.close()
    steps.close()
    return optimizer.weight, redone, norms


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(0.4)
def test_optimistic_steps_equal_synchronous_ones(name: str, p: int) -> None:
    redone = 0
    for seed in range(6 if p == 2 else 3):
        hazard = (Hazard.NONE, Hazard.SYNC_ALWAYS, Hazard.SYNC_ONCE)[seed // 3 if p == 2 else seed]
        synchronous = run_ranks(p, train, name, p, seed, False, Hazard.NONE, seed=seed)
        optimistic = run_ranks(p, train, name, p, seed, True, hazard, seed=seed, single_queue=seed % 2 == 1)
        assert [(weight, norms) for weight, _, norms in optimistic] == [(weight, norms) for weight, _, norms in synchronous]
        assert len({count for _, count, _ in optimistic}) == 1, "the outcomes differ between ranks"
        redone += optimistic[0][1]
    assert redone > 0, "no step was redone"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("p", "num_seeds"), [(2, 300), (4, 60)])
@pytest.mark.parametrize("name", FAMILIES)
def test_random_delays(name: str, p: int, num_seeds: int) -> None:
    for seed in range(num_seeds):
        synchronous = run_ranks(p, train, name, p, seed, False, Hazard.NONE, seed=seed)
        hazard = list(Hazard)[seed % 4]
        optimistic = run_ranks(p, train, name, p, seed, True, hazard, seed=seed, single_queue=seed % 2 == 1)
        assert [weight for weight, _, _ in optimistic] == [weight for weight, _, _ in synchronous]


class _ForgetfulRelay(Relay):
    """Frees what it sends before it has left."""

    def _send(self, rank: int, stepped: tuple[int, ...], statistics: GradientStatistics) -> None:
        super()._send(rank, stepped, statistics)
        self._sends = [(work, torch.empty(0), peer) for work, _, peer in self._sends]


class _HastyRelay(Relay):
    """Reads statistics before they are here."""

    def _receive(self, rank: int) -> tuple[tuple[int, ...], GradientStatistics]:
        with mock.patch.object(dist, "recv", dist.irecv):
            return super()._receive(rank)


@pytest.mark.parametrize("relay", [_ForgetfulRelay, _HastyRelay])
def test_a_relay_that_breaks_a_rule_is_noticed(relay: type[Relay]) -> None:
    found: list[Any] = []
    for seed in range(3):
        with mock.patch(f"{__name__}.Relay", relay):
            try:
                run_ranks(2, train, "zb-h1", 2, seed, True, Hazard.NONE, seed=seed)
            # memory that is not written yet may hold any number, also one without a square root
            except (FakeNcclError, AssertionError, ArithmeticError, ValueError) as error:
                found.append(error)
    assert len(found) == 3, found


def test_a_rank_that_does_not_give_up_the_discarded_messages() -> None:
    """Without `abandon` the messages of the first run are taken for those of the second; their number does not fit."""

    def nothing(self: Executor, unread: Sequence[Any]) -> None:
        """Left under way."""

    found: list[BaseException] = []
    with mock.patch.object(Executor, "abandon", nothing):
        for seed in range(6):
            try:
                run_ranks(4, train, "zb-h1", 4, seed, True, Hazard.NONE, seed=seed)
            except (FakeNcclError, AssertionError) as error:
                found.append(error)
    assert found
