"""The order of transfers under random delays, over real process groups: every family, and each rule broken once.

NCCL's rule is that both ends of a communicator issue its operations in one order, and that no operation waits for one behind it.
gloo matches the sends and receives of a link in the order of issue, too, and a send is not over before its receive is posted; so
what goes wrong on NCCL goes wrong here: a message in another's place, or ranks that wait for each other until the transfer times
out. Ops sleep, and so does every call that starts a transfer, on either end. Rule 4, about sends that are waited for too early,
is broken where a transport says when one is over (`plan/test_communication`): gloo does not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.zerobubble.errors import TransferError
from megatron.zerobubble.plan.communication import Message, Program, Step, place_communication
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import Handle, ProcessGroupLinks
from tests.runtime.support import LabelWork
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
FAMILIES = [info.name for info in known_schedules()]
NUM_RANKS, NUM_MICROBATCHES = 4, 8
PATIENCE_S, SOME_PATIENCE_S = 60.0, 4.0
"""After which a transfer is given up: one that ends, and one that cannot."""


class Late:
    """torch's own call, late by up to 2 ms. It is made on the thread that issues transfers, so that a rank's ops go on."""

    def __init__(self, call: Callable[..., Any], seed: int) -> None:
        self._call, self._random = call, random.Random(seed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self._random.random() * 2e-3)
        return self._call(*args, **kwargs)


class WaitingLinks:
    """Links that wait for every send where it is issued: what rule 3 forbids."""

    def __init__(self, links: ProcessGroupLinks) -> None:
        self._links = links

    def send(self, message: Message, tensor: torch.Tensor) -> Handle:
        handle = self._links.send(message, tensor)
        handle.wait()
        return mock.Mock()

    def receive(self, message: Message, buffer: torch.Tensor) -> Handle:
        return self._links.receive(message, buffer)


def run_iterations(rank: int, program: Program, seeds: tuple[int, ...], patience_s: float, waits: bool = False) -> str:
    """Whole iterations of a program; what went wrong on this rank, or nothing."""
    timeout = timedelta(seconds=patience_s)
    links = ProcessGroupLinks(program.plan.placement, pipeline=range(NUM_RANKS), rank=rank, device=CPU, timeout=timeout)
    wrong = ""
    for seed in seeds:
        work = LabelWork(program, max_sleep_s=2e-3, seed=10 * seed + rank)
        late = {name: Late(getattr(dist, name), 100 * seed + rank) for name in ("isend", "irecv")}
        try:
            with mock.patch.multiple(dist, **late):
                Executor(program, rank, WaitingLinks(links) if waits else links, work).run()
        except (TransferError, AssertionError, KeyError) as error:
            wrong = f"{type(error).__name__}: {error}"
            break
        assert work.ops == list(program.plan.ops[rank])
        assert work.buffers_alive == 0
    dist.barrier()  # whoever gave up closes its ends only when the others have, too
    links.close()
    return wrong


def program_of(name: str, *, lookahead: int = 1) -> Program:
    plan = build_plan(name, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    return place_communication(plan, lookahead=lookahead)


def changed(program: Program, change: Callable[[list[Step]], list[Step]]) -> Program:
    return replace(program, steps=tuple(tuple(change(list(row))) for row in program.steps))


# -- kept ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_under_delays_on_both_ends(name: str, four_ranks: RankPool) -> None:
    assert four_ranks.run(run_iterations, program_of(name), (1, 2, 3), PATIENCE_S) == [""] * 4


# -- broken -------------------------------------------------------------------------------------------------------------


def test_rule_1_receives_in_the_order_they_are_taken_in(four_ranks: RankPool) -> None:
    """Under V a link's messages are taken in another order than they are sent in."""

    def post_at_take(row: list[Step]) -> list[Step]:
        return [replace(step, post=(step.take,) if step.take else ()) for step in row]

    texts = four_ranks.run(run_iterations, changed(program_of("zbv"), post_at_take), (1,), SOME_PATIENCE_S)
    assert any("was given" in text for text in texts), texts


def test_rule_2_a_receive_behind_the_op_that_takes_it(four_ranks: RankPool) -> None:
    """There is nothing that the op could wait for."""

    def post_one_later(row: list[Step]) -> list[Step]:
        posts = [(), *(step.post for step in row)]
        return [replace(step, post=post) for step, post in zip(row, posts, strict=False)]

    texts = four_ranks.run(run_iterations, changed(program_of("zbv", lookahead=0), post_one_later), (1,), SOME_PATIENCE_S)
    assert all(text.startswith("KeyError") for text in texts), texts


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_rule_3_a_send_that_blocks_its_rank(name: str, four_ranks: RankPool) -> None:
    texts = four_ranks.run(run_iterations, program_of(name, lookahead=0), (1,), SOME_PATIENCE_S, True)
    assert any(text.startswith("TransferError: cannot") for text in texts), texts
