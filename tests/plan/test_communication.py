"""The communication pass, against a checker and an executor that know nothing of how it works.

The *checker* reads a program and recomputes what must hold of it, the order of events by vector clocks. The *rendezvous model*
executes a program on links without any buffer: a transfer happens only when its send and its receive are both posted, in the
order of both ends, at a moment that an adversary picks. What is wrong on purpose is caught by one of the two, rule by rule.
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
    Payload,
    Program,
    Step,
    colour_links,
    links_of,
    place_communication,
)
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.order import execution_order, requirements, result_of
from megatron.zerobubble.plan.passes import forward_only
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.validate import validate

FAMILIES = [info.name for info in known_schedules()]
SEARCHED = ["v-half", "v-min", "1f1b-v", "zb-interleaved"]
"""Families whose order is found, not drawn: nothing holds it to a neat bound."""


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


# -- the checker --------------------------------------------------------------------------------------------------------


def expected_transfers(plan: Plan) -> dict[Op, Message]:
    """The message that each op takes, from the dependencies alone."""
    ranks = plan.placement.stage_to_rank
    expected = {}
    for rank, row in enumerate(plan.ops):
        for op in row:
            needs = [need for need in requirements(op, plan.num_stages) if ranks[need.stage] != rank]
            if needs:
                payload = Payload.ACTIVATION if op.kind is OpKind.F else Payload.GRADIENT
                expected[op] = Message(payload, op.stage, op.microbatch, ranks[needs[0].stage], rank)
    return expected


def check(program: Program) -> None:
    """Assert everything that a program promises."""
    plan = program.plan
    assert [[step.op for step in row] for row in program.steps] == [list(row) for row in plan.ops]
    expected = expected_transfers(plan)
    taken = {step.op: step.take for row in program.steps for step in row if step.take}
    assert taken == expected
    producers = {result_of(op): op for row in plan.ops for op in row}
    sent = {step.op: step.send for row in program.steps for step in row if step.send}
    assert sent == {
        producers[need]: expected[op]
        for op in expected
        for need in requirements(op, plan.num_stages)
        if plan.placement.stage_to_rank[need.stage] == expected[op].source
    }
    check_posts(program)
    check_retires(program)
    assert {(message.source, message.target) for message in taken.values()} <= set(links_of(plan.placement))


def check_posts(program: Program) -> None:
    """Rules 1 and 2, and the number of buffers."""
    sending: dict[tuple[int, int], list[Message]] = {}
    posting: dict[tuple[int, int], list[Message]] = {}
    for rank, row in enumerate(program.steps):
        posted: set[Message] = set()
        held = most = 0
        for step in row:
            for message in step.post:
                assert message not in posted, f"{message} is posted twice"
                assert message.target == rank
                posted.add(message)
                posting.setdefault((message.source, rank), []).append(message)
            held += len(step.post)
            most = max(most, held)
            if step.take:
                assert step.take in posted, f"{step.op} takes {step.take}, which is not posted yet"
                held -= 1
            if step.send:
                sending.setdefault((rank, step.send.target), []).append(step.send)
        assert held == 0
        assert program.max_receive_buffers[rank] == most
    assert posting == sending


def check_retires(program: Program) -> None:
    """Rule 4, by vector clocks: entry r of a rank's clock is the last step of rank r whose take is known to be over."""
    clocks = [[-1] * program.plan.num_ranks for _ in program.steps]
    carried: dict[Message, list[int]] = {}
    sends: dict[Message, int] = {}
    retired = set()
    taken_at = {step.take: index for row in program.steps for index, step in enumerate(row) if step.take}
    for rank, index in execution_order(program.plan):
        step = program.steps[rank][index]
        clock = clocks[rank]
        if step.take:
            clock[:] = map(max, clock, carried[step.take])
        clock[rank] = index
        for message in step.retire:
            assert message not in retired, f"{message} is retired twice"
            assert sends[message] < index
            assert clock[message.target] >= taken_at[message], f"{step.op} retires {message}, which may not have arrived"
            retired.add(message)
        if step.send:
            sends[step.send] = index
            carried[step.send] = list(clock)


# -- the rendezvous model -----------------------------------------------------------------------------------------------


class StuckError(Exception):
    """Every rank waits."""


class BrokenError(Exception):
    """A link carried another message than was expected, or a send was retired under way."""


class Rendezvous:
    """Executes a program on links without buffers, in an order that the seed picks.

    Every third seed is lazy: a transfer happens only when no rank can go on without one, and then one alone. A retire does not
    wait: it asserts. With `blocking_sends` a rank waits after each send, which rule 3 forbids.
    """

    def __init__(self, program: Program, seed: int, *, blocking_sends: bool = False) -> None:
        self.random = random.Random(seed)
        self.lazy = seed % 3 == 0
        self.messages = [step.send for row in program.steps for step in row if step.send]
        self.number = {message: index for index, message in enumerate(self.messages)}
        links = sorted({(message.source, message.target) for message in self.messages})
        ends: dict[tuple[int, int], tuple[list[int], list[int]]] = {link: ([], []) for link in links}
        self.ends = [ends[message.source, message.target] for message in self.messages]
        self.arrived = [False] * len(self.messages)
        self.scripts = [list(self.script(row, blocking_sends)) for row in program.steps]
        self.position = [0] * len(self.scripts)
        self.ranks = [self.rank_moves(rank) for rank in range(len(self.scripts))]
        self.links = [self.link_moves(*ends[link]) for link in links]

    def script(self, row: tuple[Step, ...], blocking_sends: bool) -> Iterator[tuple[str, int]]:
        """What one rank does. Computing needs nothing but its turn, and is left out."""
        open_sends = {}
        for step in row:
            for message in step.post:
                yield "post", self.number[message]
            if step.take:
                yield "wait", self.number[step.take]
            for message in step.retire:
                del open_sends[self.number[message]]
                yield "retire", self.number[message]
            if step.send:
                open_sends[self.number[step.send]] = None
                yield "send", self.number[step.send]
                if blocking_sends:
                    yield "wait", self.number[step.send]
        for number in open_sends:
            yield "wait", number

    def run(self) -> None:
        """Run to the end, or raise."""
        movers = self.ranks if self.lazy else [*self.ranks, *self.links]
        while True:
            movable = [*movers]
            while movable:
                index = int(self.random.random() * len(movable))
                if not movable[index]():
                    del movable[index]
                elif len(movable) < len(movers):
                    movable = [*movers]
            if not self.lazy or not any(move() for move in self.random.sample(self.links, len(self.links))):
                break
        stuck = [rank for rank, script in enumerate(self.scripts) if self.position[rank] < len(script)]
        if stuck:
            raise StuckError("; ".join(f"rank {rank} at {self.here(rank)}" for rank in stuck))

    def here(self, rank: int) -> str:
        """What a rank is about to do."""
        verb, number = self.scripts[rank][self.position[rank]]
        return f"{verb} {self.messages[number]}"

    def rank_moves(self, rank: int) -> Callable[[], bool]:
        """A function that lets the rank act a few times, and says whether it did."""
        script, ends, arrived = self.scripts[rank], self.ends, self.arrived

        def move() -> bool:
            start = self.position[rank]
            end = min(len(script), start + (1, 2, 30)[int(self.random.random() * 3)])
            for position in range(start, end):
                verb, number = script[position]
                if verb == "wait":
                    if not arrived[number]:
                        end = position
                        break
                elif verb == "retire":
                    if not arrived[number]:
                        raise BrokenError(f"{self.messages[number]} is retired while under way")
                else:
                    ends[number][verb == "post"].append(number)
            self.position[rank] = end
            return end > start

        return move

    def link_moves(self, sends: list[int], receives: list[int]) -> Callable[[], bool]:
        """A function that lets one transfer of a link happen, if both ends are there."""
        moved = 0

        def move() -> bool:
            nonlocal moved
            if moved == len(sends) or moved == len(receives):
                return False
            sent, received = sends[moved], receives[moved]
            if sent != received:
                raise BrokenError(f"{self.messages[sent]} lands in the buffer of {self.messages[received]}")
            moved += 1
            self.arrived[sent] = True
            return True

        return move


# -- families of the registry -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", range(2, 7))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_its_promises_and_ends_without_buffers(name: str, p: int) -> None:
    for m in range(1, 2 * p + 2):
        for index, plan in enumerate(plans(name, p, m)):
            for lookahead in range(4):
                program = place_communication(plan, lookahead=lookahead)
                check(program)
                Rendezvous(program, seed=index + m + lookahead).run()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_adversary_does(seed: int) -> None:
    for name in FAMILIES:
        Rendezvous(place_communication(build_plan(name, num_ranks=4, num_microbatches=9)), seed).run()


@pytest.mark.parametrize("name", FAMILIES)
def test_evaluation(name: str) -> None:
    for p in range(2, 6):
        plan = forward_only(build_plan(name, num_ranks=p, num_microbatches=2 * p))
        program = place_communication(plan)
        check(program)
        for seed in range(3):
            Rendezvous(program, seed).run()


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("name", FAMILIES)
def test_receive_buffers_are_bounded_by_the_ranks_and_not_by_the_microbatches(name: str, p: int) -> None:
    most = set()
    for m in (1, 2, p, 2 * p + 1, 8 * p):
        for plan in plans(name, p, m):
            program = place_communication(plan)
            check_posts(program)
            assert max(program.max_receive_buffers) <= (2 * p if name in SEARCHED else p)
        most.add(max(place_communication(build_plan(name, num_ranks=p, num_microbatches=m)).max_receive_buffers))
    assert max(most) <= (2 * p if name in SEARCHED else min(p, 4))


def test_one_rank_sends_nothing() -> None:
    for name in FAMILIES:
        program = place_communication(build_plan(name, num_ranks=1, num_microbatches=3))
        check(program)
        assert program.max_receive_buffers == (0,)
        assert not any(step.post or step.take or step.retire or step.send for row in program.steps for step in row)


def test_last_of_kind_marks_the_last_op_of_each_kind_and_stage() -> None:
    for name in FAMILIES:
        plan = build_plan(name, num_ranks=3, num_microbatches=4)
        for row in place_communication(plan).steps:
            marked = [step.op for step in row if step.last_of_kind]
            assert {(op.stage, op.kind) for op in marked} == {(step.op.stage, step.op.kind) for step in row}
            assert all(op.microbatch == plan.num_microbatches - 1 for op in marked)


def test_a_small_program_that_a_person_can_read() -> None:
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=2)
    assert plan.to_text() == "0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1B0 1F1 1B1 1W0 1W1"
    assert [describe(row) for row in place_communication(plan).steps] == [
        [
            "0F0 send a1.0",
            "post g0.0; 0F1 send a1.1",
            "take g0.0; retire a1.0; 0B0",
            "post g0.1; 0W0",
            "take g0.1; retire a1.1; 0B1",
            "0W1",
        ],
        [
            "post a1.0; take a1.0; 1F0",
            "post a1.1; 1B0 send g0.0",
            "take a1.1; 1F1",
            "1B1 send g0.1",
            "1W0",
            "1W1",
        ],
    ]


def describe(row: tuple[Step, ...]) -> list[str]:
    """One line a step."""

    def short(message: Message) -> str:
        return f"{message.payload.value[0]}{message.stage}.{message.microbatch}"

    lines = []
    for step in row:
        before = [f"post {short(message)}; " for message in step.post]
        before += [f"take {short(step.take)}; "] if step.take else []
        before += [f"retire {short(message)}; " for message in step.retire]
        lines.append("".join(before) + str(step.op) + (f" send {short(step.send)}" if step.send else ""))
    return lines


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
        earliest: dict[tuple[int, OpKind], int] = {}
        for op in waiting:
            earliest[op.stage, op.kind] = min(op.microbatch, earliest.get((op.stage, op.kind), op.microbatch))
        ready = sorted(
            (
                op
                for op in waiting
                if op.microbatch == earliest[op.stage, op.kind] and done.issuperset(requirements(op, placement.num_stages))
            ),
            key=str,
        )
        favoured = [op for op in ready if op.kind in bias]
        op = choice.choice(favoured if favoured and choice.random() < 0.8 else ready)
        waiting.remove(op)
        done.add(result_of(op))
        rows[placement.stage_to_rank[op.stage]].append(op)
    plan = Plan.of("random", placement, num_microbatches, rows)
    validate(plan)
    return plan


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


@given(placements(), st.integers(1, 5), st.integers(0, 10**6), st.integers(0, 3))
def test_random_plans(placement: Placement, num_microbatches: int, seed: int, lookahead: int) -> None:
    program = place_communication(random_plan(placement, num_microbatches, seed), lookahead=lookahead)
    check(program)
    for offset in range(3):
        Rendezvous(program, seed + offset).run()


@given(placements(), st.integers(1, 4), st.integers(0, 10**6))
def test_a_send_is_retired_by_the_first_reply_that_proves_it(placement: Placement, num_microbatches: int, seed: int) -> None:
    program = place_communication(random_plan(placement, num_microbatches, seed))
    taken_at = {step.take: index for row in program.steps for index, step in enumerate(row) if step.take}
    sent_at = {step.send: index for row in program.steps for index, step in enumerate(row) if step.send}
    retired_at = {message: index for row in program.steps for index, step in enumerate(row) for message in step.retire}
    for message in sent_at:
        proofs = [
            taken_at[reply]
            for reply in sent_at
            if (reply.source, reply.target) == (message.target, message.source) and sent_at[reply] >= taken_at[message]
        ]
        assert retired_at.get(message) == min(proofs, default=None)


# -- tests that the tests can fail --------------------------------------------------------------------------------------


def rewrite(program: Program, change: Callable[[int, list[Step]], list[Step]]) -> Program:
    """The program with every rank's steps changed."""
    return replace(program, steps=tuple(tuple(change(rank, list(row))) for rank, row in enumerate(program.steps)))


def fails(program: Program, error: type[Exception], seeds: range = range(30)) -> bool:
    """Whether an adversary exists under whom the model raises `error`."""
    for seed in seeds:
        try:
            Rendezvous(program, seed).run()
        except error:
            return True
    return False


def test_rule_1_receives_posted_in_the_order_they_are_taken_mix_messages_up() -> None:
    def post_at_take(_: int, row: list[Step]) -> list[Step]:
        return [replace(step, post=(step.take,) if step.take else ()) for step in row]

    broken = rewrite(zbv(2, 4), post_at_take)
    with pytest.raises(AssertionError):
        check_posts(broken)
    with pytest.raises(BrokenError, match="lands in the buffer of"):
        Rendezvous(broken, seed=1).run()


def test_rule_2_a_receive_posted_after_its_taking_op_deadlocks() -> None:
    def post_one_later(_: int, row: list[Step]) -> list[Step]:
        late: tuple[Message, ...] = ()
        for index, step in enumerate(row):
            row[index] = replace(step, post=late)
            late = step.post
        return row

    good = zbv(3, 5, lookahead=0)
    Rendezvous(good, seed=1).run()
    broken = rewrite(good, post_one_later)
    with pytest.raises(AssertionError, match="not posted yet"):
        check_posts(broken)
    with pytest.raises(StuckError, match="rank 1 at"):
        Rendezvous(broken, seed=1).run()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_rule_3_a_send_that_blocks_its_rank_deadlocks(name: str) -> None:
    program = place_communication(build_plan(name, num_ranks=4, num_microbatches=8), lookahead=0)
    with pytest.raises(StuckError):
        Rendezvous(program, seed=1, blocking_sends=True).run()


def test_rule_4_a_send_retired_one_take_earlier_is_still_under_way() -> None:
    def retire_early(_: int, row: list[Step]) -> list[Step]:
        sent = {step.send: index for index, step in enumerate(row) if step.send}
        retires: list[list[Message]] = [[] for _ in row]
        for index, step in enumerate(row):
            for message in step.retire:
                earlier = [i for i in range(sent[message] + 1, index) if row[i].take]
                retires[earlier[-1] if earlier else index].append(message)
        return [replace(step, retire=tuple(messages)) for step, messages in zip(row, retires, strict=True)]

    good = zbv(3, 6)
    assert not fails(good, BrokenError)
    broken = rewrite(good, retire_early)
    with pytest.raises(AssertionError, match="may not have arrived"):
        check_retires(broken)
    assert fails(broken, BrokenError)


def test_the_checker_sees_a_lost_and_a_doubled_post() -> None:
    good = zbv(2, 3)

    def lose(rank: int, row: list[Step]) -> list[Step]:
        return [replace(step, post=step.post[1:]) if rank == 1 and index == 0 else step for index, step in enumerate(row)]

    def double(rank: int, row: list[Step]) -> list[Step]:
        return [replace(step, post=step.post * 2) if rank == 1 and index == 0 else step for index, step in enumerate(row)]

    with pytest.raises(AssertionError, match="not posted yet"):
        check_posts(rewrite(good, lose))
    with pytest.raises(AssertionError, match="posted twice"):
        check_posts(rewrite(good, double))


# -- links and colours --------------------------------------------------------------------------------------------------


def test_links_of() -> None:
    assert links_of(Placement.linear(3)) == ((0, 1), (1, 0), (1, 2), (2, 1))
    assert links_of(Placement.v(3)) == links_of(Placement.linear(3))
    assert links_of(Placement.loop(3, 2)) == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
    assert links_of(Placement.linear(1)) == links_of(Placement.v(1)) == ()


def check_colours(placement: Placement) -> int:
    """No rank twice in a colour, every link in one colour. Returns the number of colours."""
    links = links_of(placement)
    colours = colour_links(links)
    assert sorted(link for colour in colours for link in colour) == list(links)
    for colour in colours:
        ranks = [rank for link in colour for rank in link]
        assert len(ranks) == len(set(ranks))
    return len(colours)


def test_a_chain_of_any_length_has_four_colours() -> None:
    for p in (*range(2, 20), 64, 257):
        assert check_colours(Placement.linear(p)) == (2 if p == 2 else 4)
        assert check_colours(Placement.v(p)) == (2 if p == 2 else 4)


def test_a_ring_needs_at_most_six() -> None:
    for p in (*range(2, 20), 64, 257):
        assert check_colours(Placement.loop(p, 2)) <= 6


@given(placements())
def test_any_placement_is_coloured_without_conflict(placement: Placement) -> None:
    check_colours(placement)


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
def test_the_pass_is_linear_in_the_ops(name: str) -> None:
    small, large = (build_plan(name, num_ranks=4, num_microbatches=m) for m in (32, 128))
    ratio = lines_executed(lambda: place_communication(large)) / lines_executed(lambda: place_communication(small))
    assert ratio < 4.2
