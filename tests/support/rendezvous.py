"""Two ways to find a wrong program: a checker, and an executor on links without any buffer.

The *checker* reads a program and recomputes what must hold of it, the order of events by vector clocks. The *rendezvous model*
executes a program: a transfer happens only when its send and its receive are both posted, in the order of both ends, at a moment
that an adversary picks. Both are independent of how the communication pass works.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from megatron.zerobubble.plan.communication import (
    Message,
    Payload,
    Program,
    Step,
    links_of,
)
from megatron.zerobubble.plan.dependencies import execution_order, requirements, result_of
from megatron.zerobubble.plan.ir import Op, OpKind, Plan

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
    """All ranks wait: a deadlock."""


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
        """A function that lets the rank act a few times, and returns whether it did."""
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
