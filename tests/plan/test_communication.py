"""`place_communication`, against an independent checker (`program_checker`), which catches deliberate violations of each rule.

Whether programs end is in `test_deadlock.py`. That sends must not block their rank (rule 3) is in
`tests/runtime/test_executor.py` and `tests/runtime/test_on_fake_nccl.py`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zerobubble.plan.communication import (
    Message,
    Program,
    Step,
    color_links,
    links_of,
    longest_messages,
    place_communication,
    speculative_forwards,
)
from megatron.zerobubble.plan.dependencies import requirements, result_of
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.validate import validate
from tests.support.plans import paired, receive_buffers
from tests.support.program_checker import check, check_posts, check_retires
from tests.support.programs import FAMILIES, post_at_take, post_one_later, rewrite

pytestmark = pytest.mark.claims(
    "Schedules",
    "transfers: order, buffers, no deadlock, random delays on both ends, every schedule; each of three rules broken on "
    "purpose is noticed",
    "works, gloo and a model without buffers; on NCCL by `runtime/test_gpu.py`, but for broken rules",
    also=("runtime/test_executor.py",),
)


def plans(name: str, p: int, m: int) -> Iterator[Plan]:
    """The plans of one family; `zb` at several numbers of pending microbatches."""
    yield build_plan(name, num_ranks=p, num_microbatches=m)
    if name == "zb":
        yield build_plan(name, num_ranks=p, num_microbatches=m, max_pending_backward=p // 2 + 1)
    if name == "interleaved-1f1b" and p < 5:
        yield build_plan(name, num_ranks=p, num_microbatches=m, num_chunks=3)


def zbv(p: int, m: int, lookahead: int = 1) -> Program:
    """A program whose links are taken in another order than they are sent in."""
    return place_communication(build_plan("zbv", num_ranks=p, num_microbatches=m), lookahead=lookahead)


# -- fences -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3, 6])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(0.34)
def test_an_iteration_can_be_discarded_at_the_fence(name: str, p: int) -> None:
    """Ops before it need no message from behind it, no receive behind it is posted before it, and unread messages are known."""
    for m in {1, 2, p, 2 * p + 1}:
        for plan in plans(name, p, m):
            fence = speculative_forwards(plan)
            assert fence[-1] == 0
            assert all(0 < count <= p - rank for rank, count in enumerate(fence[:-1]))
            program = place_communication(plan, fence=fence)
            check(program)
            before = [steps[:count] for steps, count in zip(program.steps, fence, strict=True)]
            sent = {message for steps in before for step in steps for message in step.send}
            for rank, steps in enumerate(before):
                taken = {message for step in steps for message in step.take}
                assert {op.kind for step in steps for op in step.ops} <= {OpKind.F}
                assert taken <= sent
                assert {message for step in steps for message in step.post} == taken
                assert set(program.unread(rank)) == {message for message in sent if message.target == rank} - taken


# -- families of the registry -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(0.34)
def test_receive_buffers_are_few_for_any_number_of_ranks_and_microbatches(name: str, p: int) -> None:
    for m in (1, 2, p, 2 * p + 1, 8 * p):
        for plan in plans(name, p, m):
            program = place_communication(plan)
            check_posts(program)
            assert max(receive_buffers(program)) <= (6 if name in ("zb-interleaved", "zb-w") else 4)


# -- random plans -------------------------------------------------------------------------------------------------------


def random_plan(placement: Placement, num_microbatches: int, seed: int) -> Plan:
    """A valid plan by a random list scheduler: any op whose requirements are met may be next on its rank."""
    choice = random.Random(seed)
    fused_share = choice.choice((0.0, 0.5, 1.0))
    rows: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    chains = {
        (stage, microbatch): [OpKind.F, *([OpKind.BW] if choice.random() < fused_share else [OpKind.B, OpKind.W])]
        for stage in range(placement.num_stages)
        for microbatch in range(num_microbatches)
    }
    waiting = {Op(key[0], kind, key[1]) for key, kinds in chains.items() for kind in kinds}
    done: set[Op] = set()
    bias = choice.choice(([OpKind.F], [OpKind.B, OpKind.BW], [OpKind.W], []))
    while waiting:
        earliest: dict[tuple[int, str], int] = {}
        for op in waiting:
            for part in op.kind.value:  # a BW is a B and a W
                earliest[op.stage, part] = min(op.microbatch, earliest.get((op.stage, part), op.microbatch))
        in_order = (op for op in waiting if all(op.microbatch == earliest[op.stage, part] for part in op.kind.value))
        ready = sorted((op for op in in_order if done.issuperset(requirements(op, placement.num_stages))), key=str)
        favored = [op for op in ready if op.kind in bias]
        op = choice.choice(favored if favored and choice.random() < 0.8 else ready)
        waiting.remove(op)
        done.add(result_of(op))
        rows[placement.stage_to_rank[op.stage]].append(op)
    plan = Plan.of("random", placement, num_microbatches, rows)
    validate(plan)
    return paired(plan, choice, share=choice.choice((0.0, 0.0, 0.5, 1.0)))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Linear, loop, V, and any other way to put stages on ranks."""
    p = draw(st.integers(2, 4))
    kind = draw(st.sampled_from(("linear", "loop", "V", "custom")))
    if kind == "linear":
        return Placement.linear(p)
    if kind == "loop":
        return Placement.loop(p, draw(st.integers(2, 3)))
    if kind == "V":
        return Placement.v(p)
    extra = draw(st.lists(st.integers(0, p - 1), max_size=4))
    return Placement(tuple(draw(st.permutations([*range(p), *extra]))))


@given(placements(), st.integers(1, 4), st.integers(0, 10**6))
def test_a_send_is_retired_by_the_first_reply_that_proves_it(placement: Placement, num_microbatches: int, seed: int) -> None:
    program = place_communication(random_plan(placement, num_microbatches, seed))
    taken_at = {message: index for row in program.steps for index, step in enumerate(row) for message in step.take}
    sent_at = {message: index for row in program.steps for index, step in enumerate(row) for message in step.send}
    retired_at = {message: index for row in program.steps for index, step in enumerate(row) for message in step.retire}
    for message in sent_at:
        proofs = [
            taken_at[reply]
            for reply in sent_at
            if (reply.source, reply.target) == (message.target, message.source) and sent_at[reply] >= taken_at[message]
        ]
        assert retired_at.get(message) == min(proofs, default=None)


# -- tests that the tests can fail --------------------------------------------------------------------------------------


def test_rule_1_receives_posted_in_the_order_they_are_taken_mix_messages_up() -> None:
    broken = rewrite(zbv(2, 4), post_at_take)
    with pytest.raises(AssertionError):
        check_posts(broken)


def test_rule_2_a_receive_posted_after_its_taking_op_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not posted yet"):
        check_posts(rewrite(zbv(3, 5, lookahead=0), post_one_later))


def test_rule_4_a_send_retired_one_take_earlier_is_still_under_way() -> None:
    def retire_early(_: int, row: list[Step]) -> list[Step]:
        sent = {message: index for index, step in enumerate(row) for message in step.send}
        retires: list[list[Message]] = [[] for _ in row]
        for index, step in enumerate(row):
            for message in step.retire:
                earlier = [i for i in range(sent[message] + 1, index) if row[i].take]
                retires[earlier[-1] if earlier else index].append(message)
        return [replace(step, retire=tuple(messages)) for step, messages in zip(row, retires, strict=True)]

    with pytest.raises(AssertionError, match="may not have arrived"):
        check_retires(rewrite(zbv(3, 6), retire_early))


# -- links and colors --------------------------------------------------------------------------------------------------


def test_the_longest_message_of_a_link_goes_either_way() -> None:
    """Stage 2 of a V over three ranks is rank 2's own neighbor; stages 4 and 5 pass back to ranks 1 and 0."""
    assert longest_messages(Placement.linear(3), [1, 3, 3]) == {(0, 1): 1, (1, 0): 1, (1, 2): 3, (2, 1): 3}
    assert longest_messages(Placement.v(3), [1, 1, 1, 1, 2, 2]) == {(0, 1): 2, (1, 0): 2, (1, 2): 1, (2, 1): 1}


def check_colors(placement: Placement) -> int:
    """No rank twice in a color, every link in one color. Returns the number of colors."""
    links = links_of(placement)
    colors = color_links(links)
    assert sorted(link for color in colors for link in color) == list(links)
    for color in colors:
        ranks = [rank for link in color for rank in link]
        assert len(ranks) == len(set(ranks))
    return len(colors)


def test_a_chain_of_any_length_has_four_colors() -> None:
    for p in (*range(2, 20), 64, 257):
        assert check_colors(Placement.linear(p)) == (2 if p == 2 else 4)
        assert check_colors(Placement.v(p)) == (2 if p == 2 else 4)


def test_a_ring_needs_at_most_six() -> None:
    for p in (*range(2, 20), 64, 257):
        assert check_colors(Placement.loop(p, 2)) <= 6


@given(placements())
def test_any_placement_is_colored_without_conflict(placement: Placement) -> None:
    check_colors(placement)


# -- cost ---------------------------------------------------------------------------------------------------------------


def lines_executed(function: Callable[[], Any]) -> int:
    """How many lines of Python `function` executes: a measure of time that is the same on every machine."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(0.3)
def test_the_pass_is_linear_in_the_ops(name: str) -> None:
    small, large = (build_plan(name, num_ranks=4, num_microbatches=m) for m in (32, 128))
    ratio = lines_executed(lambda: place_communication(large)) / lines_executed(lambda: place_communication(small))
    assert ratio < 4.2
