"""Several recorders at once, and one that overrides nothing. What the executor reports, in which order: `test_executor`."""

from __future__ import annotations

from collections.abc import Callable

from megatron.zerobubble.plan.communication import Message, Program, Step, place_communication
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.recording import Recorder, fan_out
from tests.runtime.support import LabelWork, NoLinks

LABEL_BYTES = 12
"""Of the tensors that `LabelWork` gives: three float32."""


class Scribe(Recorder):
    """Writes everything down."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Message | Op]] = []
        self.in_transit: list[int] = []

    def start(self, op: Op) -> None:
        self.log.append(("start", op))

    def end(self, op: Op) -> None:
        self.log.append(("end", op))

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        self.log.append(("settled", op))
        self.in_transit.append(in_transit())

    def posted(self, message: Message) -> None:
        self.log.append(("posted", message))

    def awaited(self, message: Message) -> None:
        self.log.append(("awaited", message))

    def taken(self, message: Message) -> None:
        self.log.append(("taken", message))

    def sent(self, message: Message) -> None:
        self.log.append(("sent", message))

    def retired(self, message: Message) -> None:
        self.log.append(("retired", message))

    def rewind(self) -> None:
        self.log.clear()


class NoOp(Recorder):
    """Overrides nothing."""


class GivingWork(LabelWork):
    """Takes whatever comes: no links move anything here."""

    def _check(self, *given: object) -> None:
        """Anything goes."""


def expected_log(steps: tuple[Step, ...]) -> tuple[list[tuple[str, Message | Op]], list[int]]:
    """The log up to the last op, and how many tensors are between senders and takers after each op."""
    log: list[tuple[str, Message | Op]] = []
    flying, counts = 0, []
    for step in steps:
        log += [("posted", message) for message in step.post]
        log += [("awaited", step.take), ("taken", step.take)] if step.take else []
        log += [("retired", message) for message in step.retire]
        log += [("start", step.op), ("end", step.op)]
        log += [("sent", step.send)] if step.send else []
        log += [("settled", step.op)]
        flying += len(step.post) - (step.take is not None) - len(step.retire) + (step.send is not None)
        counts.append(flying)
    return log, counts


def test_a_fan_out_calls_all_recorders_alike() -> None:
    program = place_communication(build_plan("zbv", num_ranks=2, num_microbatches=3))
    scribes = Scribe(), Scribe()
    several = fan_out(scribes)
    assert several is not None
    Executor(program, 0, NoLinks(), GivingWork(program), several).run()
    alone = run(program, 0)
    for scribe in scribes:
        assert (scribe.log, scribe.in_transit) == (alone.log, alone.in_transit)
    several.rewind()
    assert not scribes[0].log
    assert not scribes[1].log


def test_a_fan_out_of_a_fan_out_and_of_recorders_that_override_nothing() -> None:
    program = place_communication(build_plan("zbv", num_ranks=2, num_microbatches=3))
    scribe, alone = Scribe(), run(program, 0)
    inner = fan_out([NoOp(), scribe])
    assert inner is not None
    Executor(program, 0, NoLinks(), GivingWork(program), fan_out([NoOp(), inner])).run()
    assert (scribe.log, scribe.in_transit) == (alone.log, alone.in_transit)


def test_no_fan_out_of_less_than_two() -> None:
    alone = NoOp()
    assert fan_out([]) is None
    assert fan_out([alone]) is alone


def run(program: Program, rank: int) -> Scribe:
    scribe = Scribe()
    Executor(program, rank, NoLinks(), GivingWork(program), scribe).run()
    return scribe


def test_a_tensor_that_a_rank_hands_to_itself_is_in_transit() -> None:
    program = place_communication(build_plan("zbv", num_ranks=1, num_microbatches=2))
    in_transit = dict(zip(map(str, program.plan.ops[0]), run(program, 0).in_transit, strict=True))
    assert str(program.plan.ops[0][0]) == "0F0"
    assert in_transit["0F0"] == LABEL_BYTES
    assert run(program, 0).in_transit[-1] == 0


def test_a_recorder_may_override_nothing() -> None:
    program = place_communication(build_plan("zb-h1", num_ranks=2, num_microbatches=2))
    work = GivingWork(program)
    Executor(program, 0, NoLinks(), work, NoOp()).run()
    assert len(work.plan.ops[0]) == 6
