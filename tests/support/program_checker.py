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
    assert [[step.ops for step in row] for row in program.steps] == [list(row) for row in plan.launches]
    expected = expected_transfers(plan)
    sent = {
        result_of(need): expected[op]
        for op in expected
        for need in requirements(op, plan.num_stages)
        if plan.placement.stage_to_rank[need.stage] == expected[op].source
    }
    for row in program.steps:
        for step in row:
            assert step.take == tuple(expected[op] for op in step.ops if op in expected)
            assert step.send == tuple(sent[result] for result in map(result_of, step.ops) if result in sent)
    check_posts(program)
    check_retires(program)
    assert {(message.source, message.target) for message in expected.values()} <= set(links_of(plan.placement))


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
            for message in step.take:
                assert message in posted, f"{step.ops} takes {message}, which is not posted yet"
                held -= 1
            for message in step.send:
                sending.setdefault((rank, message.target), []).append(message)
        assert held == 0
    assert posting == sending


def check_retires(program: Program) -> None:
    """Rule 4, by vector clocks: entry r of a rank's clock is the last step of rank r whose take is known to be over."""
    clocks = [[-1] * program.plan.num_ranks for _ in program.steps]
    carried: dict[Message, list[int]] = {}
    sends: dict[Message, int] = {}
    retired = set()
    taken_at = {message: index for row in program.steps for index, step in enumerate(row) for message in step.take}
    for rank, index in execution_order(program.plan):
        step = program.steps[rank][index]
        clock = clocks[rank]
        for message in step.take:
            clock[:] = map(max, clock, carried[message])
        clock[rank] = index
        for message in step.retire:
            assert message not in retired, f"{message} is retired twice"
            assert sends[message] < index
            assert clock[message.target] >= taken_at[message], f"{step.ops} retires {message}, which may not have arrived"
            retired.add(message)
        for message in step.send:
            sends[message] = index
            carried[message] = list(clock)
