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
from tests.support.programs import FAMILIES
from tests.support.ranks import RankPool

NUM_RANKS, NUM_MICROBATCHES = 4, 8


def program_of(name: str, *, lookahead: int = 1) -> Program:
    plan = build_plan(name, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    return place_communication(plan, lookahead=lookahead)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_under_delays_on_both_ends(name: str, four_ranks: RankPool) -> None:
    assert four_ranks.run(run_under_delays, program_of(name), (1, 2, 3)) == [""] * NUM_RANKS
