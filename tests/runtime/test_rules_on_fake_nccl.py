"""Each rule of ours for order, buffers and streams, broken once: the fake NCCL notices (docs/adr/0003).

Unchanged, the same programs run to their end there under the same seeds (`test_on_fake_nccl`). Some breaks show only in some of
the orders in which things can happen, which is why several seeds are run; vector clocks find a missing order in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.plan.communication import Message, place_communication, speculative_forwards
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.runtime import p2p
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import Handle, P2PLinks, ProcessGroupLinks
from tests.runtime.delays import WaitingLinks
from tests.runtime.on_fake_nccl import Setup, run_program
from tests.runtime.test_on_fake_nccl import outcomes, program_of
from tests.support.fake_nccl.memory import OrderError
from tests.support.programs import post_at_take, post_one_later, rewrite

SEEDS = range(9)
"""Three of each kind of lateness."""


# -- order: rules 1 to 4 ------------------------------------------------------------------------------------------------------


def test_rule_1_receives_in_the_order_they_are_taken_in() -> None:
    """Under V a link's messages are taken in another order than they are sent in."""
    assert outcomes(rewrite(program_of("zbv", 2), post_at_take), Setup(), SEEDS) == {"AssertionError": 9}


def test_rule_2_a_receive_behind_the_op_that_takes_it() -> None:
    """There is nothing that the op could wait for."""
    assert outcomes(rewrite(program_of("zbv", 2, lookahead=0), post_one_later), Setup(), SEEDS) == {"KeyError": 9}


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_rule_3_a_send_that_blocks_its_rank(name: str) -> None:
    """With receives on the plan's timeline ranks only wait for each other; with receives at their op they wait for ever."""
    assert outcomes(program_of(name, 2), Setup(links=WaitingLinks), SEEDS) == {"stalls": 9}
    program = program_of(name, 2, lookahead=0)
    assert outcomes(program, Setup(links=WaitingLinks), SEEDS) == {"StuckError": 9}
    assert outcomes(program, Setup(), SEEDS) == {"ends": 9}


def test_rule_4_a_send_that_is_retired_before_it_is_proven_to_have_arrived() -> None:
    """Before the next op instead: the stream waits for the peer."""

    def retire_early(_: int, row: list[Any]) -> list[Any]:
        before = [(), *[(step.send,) if step.send else () for step in row[:-1]]]
        return [replace(step, retire=retired) for step, retired in zip(row, before, strict=True)]

    found = outcomes(rewrite(program_of("zb-h1", 4), retire_early), Setup(), SEEDS)
    assert found["ends"] < 5, found
    assert found["stalls"] + found["StuckError"] > 4, found


# -- buffers ------------------------------------------------------------------------------------------------------------------


class Forgetful:
    """Links whose handles keep no tensor."""

    def __init__(self, links: P2PLinks) -> None:
        self._links = links

    def send(self, message: Message, tensor: Tensor) -> Handle:
        handle: Any = self._links.send(message, tensor)
        handle.tensor = None
        return handle  # type: ignore[no-any-return]

    def receive(self, message: Message, buffer: Tensor) -> Handle:
        handle: Any = self._links.receive(message, buffer)
        handle.tensor = None
        return handle  # type: ignore[no-any-return]


class _Hasty(Executor):
    """Reads what it received without waiting for it."""

    def _take(self, step: Any) -> Tensor | None:
        if step.take is None:
            return super()._take(step)
        tensor, _ = self._receiving.pop(step.take)
        return tensor


class _Careless(Executor):
    """Frees the buffers of what it drops without waiting for it."""

    def abandon(self, unread: Sequence[Message]) -> None:
        for message in unread:
            self._links.receive(message, self._work.buffer(message))
        super().abandon(())


def test_a_sent_tensor_that_is_freed_is_overwritten_by_its_memorys_next_owner() -> None:
    with pytest.raises(OrderError, match=r"\(a temporary tensor\) writes .*, and nothing orders it after: send \d+ of .* reads"):
        run_program(program_of("zb-h1", 2), 0, Setup(links=Forgetful))
    assert outcomes(program_of("zb-h1", 2), Setup(links=Forgetful), SEEDS) == {"OrderError": 9}


def test_a_sent_tensor_that_is_freed_arrives_as_something_else() -> None:
    """Without the clocks, where its memory was handed out again before it left."""
    found = outcomes(program_of("zb-h1", 2), Setup(links=Forgetful), SEEDS, checks=False)
    assert found["AssertionError"] > 0, found


def test_a_message_that_is_read_before_it_is_waited_for_is_noticed() -> None:
    with pytest.raises(OrderError, match=r"1F0 reads .*, and nothing orders it after: receive \d+ of .* writes"):
        run_program(program_of("zb-h1", 2), 1, Setup(executor=_Hasty))
    assert outcomes(program_of("zb-h1", 2), Setup(executor=_Hasty), SEEDS) == {"OrderError": 9}


def test_a_receive_buffer_that_is_freed_is_noticed() -> None:
    plan = build_plan("zb-h1", num_ranks=3, num_microbatches=6)
    program = place_communication(plan, fence=speculative_forwards(plan))
    setup = Setup(links=Forgetful, executor=_Careless, rewinds=True)
    found = outcomes(program, setup, SEEDS)
    assert found["OrderError"] == 9, found


# -- communicators --------------------------------------------------------------------------------------------------------


def _lazily(_: ProcessGroupLinks, __: Sequence[tuple[int, int]]) -> None:
    """In place of `_open`: a link is first used by its first message."""


def _in_pairs(links: ProcessGroupLinks, pairs: Sequence[tuple[int, int]]) -> None:
    """In place of `_open`: in an order that both ends of a communicator share, if several links share it."""
    for link in sorted(pairs):
        links._pass(torch.zeros(1), link)


@pytest.mark.parametrize("eager", [True, False])
def test_links_that_share_a_communicator(eager: bool) -> None:
    """One group for all: in eager mode all links of a rank are one channel, and in lazy mode both directions of a pair.

    The order of today's placement holds whatever is serialized with what; with receives one op early the ranks wait for ever.
    """
    broken = {"color_links": lambda links: (tuple(links),)}
    for lookahead, expected in ((1, "StuckError"), (None, "ends")):
        with mock.patch.multiple(p2p, **broken), mock.patch.object(ProcessGroupLinks, "_open", _in_pairs):
            found = outcomes(program_of("zbv", 4, lookahead=lookahead), Setup(), SEEDS, eager=eager)
        assert found == {expected: 9}


def test_links_that_are_opened_by_their_first_message() -> None:
    """The hosts of both ends wait for each other, and for their devices, in the middle of an iteration."""
    for lookahead, expected in ((1, "StuckError"), (None, "ends")):
        with mock.patch.object(ProcessGroupLinks, "_open", _lazily):
            found = outcomes(program_of("1f1b", 4, lookahead=lookahead), Setup(), SEEDS)
        assert found == {expected: 9}
