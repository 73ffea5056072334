"""The order of transfers under random delays, over real process groups: every family, and each rule broken once.

NCCL's rule is that both ends of a communicator issue its operations in one order, and that no operation waits for one behind it.
gloo matches the sends and receives of a link in the order of issue, too, and a send is not over before its receive is posted; so
what goes wrong on NCCL goes wrong here: a message in another's place, or ranks that wait for each other until the transfer times
out. Ops sleep, and so does every call that starts a transfer, on either end. Rule 4, about sends that are waited for too early,
is broken where a transport says when one is over (`plan/test_communication`): gloo does not.
"""

from __future__ import annotations

import pytest

from megatron.zerobubble.plan.communication import Program, place_communication
from megatron.zerobubble.plan.registry import build_plan
from tests.runtime.delays import run_under_delays
from tests.support.programs import FAMILIES, post_at_take, post_one_later, rewrite
from tests.support.ranks import RankPool

NUM_RANKS, NUM_MICROBATCHES = 4, 8
PATIENCES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""How long a transfer may take before it is called stuck, where one is: the first that this machine needs for what can end."""


def program_of(name: str, *, lookahead: int = 1) -> Program:
    plan = build_plan(name, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    return place_communication(plan, lookahead=lookahead)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_under_delays_on_both_ends(name: str, four_ranks: RankPool) -> None:
    assert four_ranks.run(run_under_delays, program_of(name), (1, 2, 3)) == [""] * NUM_RANKS


def test_rule_1_receives_in_the_order_they_are_taken_in(four_ranks: RankPool) -> None:
    """Under V a link's messages are taken in another order than they are sent in."""
    texts = four_ranks.run(run_under_delays, rewrite(program_of("zbv"), post_at_take), (1,))
    assert any("was given" in text for text in texts), texts


def test_rule_2_a_receive_behind_the_op_that_takes_it(four_ranks: RankPool) -> None:
    """There is nothing that the op could wait for."""
    texts = four_ranks.run(run_under_delays, rewrite(program_of("zbv", lookahead=0), post_one_later), (1,))
    assert all(text.startswith("KeyError") for text in texts), texts


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_rule_3_a_send_that_blocks_its_rank(name: str, four_ranks: RankPool) -> None:
    """The same iteration ends, within the same patience, where sends are not waited for: it is not that the machine is slow."""
    program = program_of(name, lookahead=0)
    patience_s = next(each for each in PATIENCES_S if four_ranks.run(run_under_delays, program, (1,), each) == [""] * NUM_RANKS)
    texts = four_ranks.run(run_under_delays, program, (1,), patience_s, True)
    assert all(text.startswith("TransferError: cannot send") for text in texts), texts
