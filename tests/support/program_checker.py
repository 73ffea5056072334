"""A checker of programs: reads one and recomputes what must hold of it, the order of events by vector clocks.

It is independent of how the communication pass works. Whether a program ends is asked of `stuck_ranks`.
"""

from __future__ import annotations

from megatron.zerobubble.plan.communication import (
    Message,
    Payload,
    Program,
    links_of,
)
from megatron.zerobubble.plan.dependencies import execution_order, requirements, result_of
from megatron.zerobubble.plan.ir import Op, OpKind, Plan


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
        held = 0
        for step in row:
            for message in step.post:
                assert message not in posted, f"{message} is posted twice"
                assert message.target == rank
                posted.add(message)
                posting.setdefault((message.source, rank), []).append(message)
            held += len(step.post)
            if step.take:
                assert step.take in posted, f"{step.op} takes {step.take}, which is not posted yet"
                held -= 1
            if step.send:
                sending.setdefault((rank, step.send.target), []).append(step.send)
        assert held == 0
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
