"""The executor on links that deliver late and never buffer: what it issues when, how long it keeps what it sent, what goes wrong.

That every tensor reaches its op whatever is late is in `test_on_fake_nccl`.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.zerobubble.errors import ExecutionError, TransferError
from megatron.zerobubble.plan.communication import Message, Program, Step, place_communication
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.transforms import forward_only
from megatron.zerobubble.runtime.executor import Executor, StageWork
from megatron.zerobubble.runtime.p2p import Handle, P2PLinks
from megatron.zerobubble.runtime.recording import Recorder, fan_out
from tests.runtime.delays import run_under_delays
from tests.runtime.on_fake_nccl import Setup, run_program
from tests.runtime.support import LabelWork, NoLinks
from tests.support.fake_nccl.device import Device
from tests.support.programs import FAMILIES
from tests.support.ranks import RankPool


class Scribe(Recorder):
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


class _Watched(Scribe):
    """The links and the recorder of a rank: also counts, when an op starts, the sent tensors still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []
        self._links: P2PLinks = NoLinks()

    def over(self, links: P2PLinks) -> P2PLinks:
        self._links = links
        return self

    def send(self, message: Message, tensor: Tensor) -> Handle:
        self.tensors.append(weakref.ref(tensor))
        return self._links.send(message, tensor)

    def receive(self, message: Message, buffer: Tensor) -> Handle:
        return self._links.receive(message, buffer)

    def start(self, op: Op) -> None:
        super().start(op)
        self.alive.append(sum(tensor() is not None for tensor in self.tensors))


def check(program: Program, seed: int) -> None:
    """Run it, and check what must hold whatever was late."""
    ranks: dict[int, _Watched] = {}

    def of_rank() -> _Watched:
        return ranks.setdefault(Device.current().rank, _Watched())

    results = run_program(program, seed, Setup(recorder=of_rank, links=lambda links: of_rank().over(links)))
    for rank, result in enumerate(results):
        seen = ranks[rank]
        assert not result.stalls, "a retired send was still under way"
        assert not any(tensor() is not None for tensor in seen.tensors)
        log, counts = expected_log(program.steps[rank])
        assert seen.log[: len(log)] == log
        sent, retired = ([message for what, message in seen.log if what == wanted] for wanted in ("sent", "retired"))
        assert {("retired", message) for message in set(sent) - {each for what, each in log if what == "retired"}} == {
            *seen.log[len(log) :]
        }
        assert sorted(map(str, sent)) == sorted(map(str, retired))
        assert seen.alive == expected_alive(program.steps[rank])
        ranks_of = program.plan.placement.stage_to_rank
        if all(one != other for one, other in itertools.pairwise(ranks_of)):  # else a rank also hands over to itself
            assert seen.in_transit == [LABEL_BYTES * count for count in counts]


def expected_alive(steps: tuple[Step, ...]) -> list[int]:
    """For each op, the tensors sent and not retired when it starts."""
    alive, counts = 0, []
    for step in steps:
        alive -= len(step.retire)
        counts.append(alive)
        alive += len(step.send)
    return counts


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(0.5)
def test_transfers_are_issued_taken_and_retired_as_the_program_says(name: str, p: int) -> None:
    for m in (1, p + 1):
        plan = build_plan(name, num_ranks=p, num_microbatches=m)
        check(place_communication(plan), seed=m)
        check(place_communication(forward_only(plan)), seed=m)


@pytest.mark.parametrize("lookahead", range(4))
@pytest.mark.parametrize("name", ["zb-h2", "zbv", "interleaved-1f1b"])
def test_receives_may_be_posted_any_number_of_ops_ahead(name: str, lookahead: int) -> None:
    check(place_communication(build_plan(name, num_ranks=3, num_microbatches=6), lookahead=lookahead), seed=lookahead)


@pytest.mark.parametrize(("batched", "lookahead"), [(False, 1), (True, None)])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_under_delays_on_both_ends(name: str, batched: bool, lookahead: int | None, four_ranks: RankPool) -> None:
    program = place_communication(build_plan(name, num_ranks=4, num_microbatches=8), lookahead=lookahead)
    assert four_ranks.run(run_under_delays, program, (1,) if batched else (1, 2, 3), batched) == [""] * 4


# -- what goes wrong ----------------------------------------------------------------------------------------------------


class AnyWork(StageWork):
    """Takes anything. Ops named in `gives` return what is given there, others a tensor."""

    def __init__(self, gives: dict[str, Tensor | None] | None = None) -> None:
        self.gives = gives or {}

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor | None:
        return self.gives.get(str(op), torch.zeros(1))

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
        return self.gives.get(str(op), torch.zeros(1))

    def weight_gradient(self, op: Op, last: bool) -> None:
        """Nothing to do."""

    def buffer(self, message: Message) -> Tensor:
        return torch.zeros(1)


def program_of(placement: Placement, *rows: str) -> Program:
    """A program from the text of a plan, without validation."""
    plan = Plan.of("test", placement, 1, [[Op.parse(word) for word in row.split()] for row in rows])
    return place_communication(plan)


def test_a_tensor_that_no_op_takes() -> None:
    program = program_of(Placement.v(1), "0F0")
    with pytest.raises(ExecutionError, match=r"rank 0: no op took .*ACTIVATION.* the plan is incomplete"):
        Executor(program, 0, NoLinks(), AnyWork()).run()


def test_a_receive_that_no_op_takes() -> None:
    program = program_of(Placement.linear(2), "0F0 0B0 0W0", "1F0 1B0 1W0")
    row = list(program.steps[0])
    row[1] = dataclasses.replace(row[1], take=())
    broken = dataclasses.replace(program, steps=(tuple(row), program.steps[1]))
    with pytest.raises(ExecutionError, match=r"rank 0: no op took .*GRADIENT.* and 0 more"):
        Executor(broken, 0, NoLinks(), AnyWork()).run()


@pytest.mark.parametrize(
    ("op", "rank", "missing"),
    [("1F0", 1, "activation for stage 2"), ("2B0", 1, "gradient for stage 1"), ("3B0", 0, "gradient for stage 2")],
)
def test_an_op_that_returns_nothing_is_named_and_its_reader_not_left_waiting(op: str, rank: int, missing: str) -> None:
    """On a link and within a rank alike: None would be taken for the first or last stage's input, or wait forever."""
    program = place_communication(build_plan("zbv", num_ranks=2, num_microbatches=1))
    with pytest.raises(ExecutionError, match=rf"rank {rank}: {op} returned no tensor.* the {missing}, microbatch 0"):
        Executor(program, rank, NoLinks(), AnyWork({op: None})).run()


@pytest.mark.parametrize("kind", list(OpKind))
def test_an_exception_in_an_op_is_the_one_that_is_raised(kind: OpKind) -> None:
    name = "1f1b" if kind is OpKind.BW else "zb-h1"
    program = place_communication(build_plan(name, num_ranks=2, num_microbatches=3))
    fault = ZeroDivisionError(f"in {kind}")

    class Faulty(AnyWork):
        def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor | None:
            return self.fail_in(op)

        def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
            return self.fail_in(op)

        def weight_gradient(self, op: Op, last: bool) -> None:
            self.fail_in(op)

        def fail_in(self, op: Op) -> Tensor:
            if op.kind is kind and op.microbatch == 1:
                raise fault
            return torch.zeros(1)

    with pytest.raises(ZeroDivisionError) as error:
        Executor(program, 0, NoLinks(), Faulty()).run()
    assert error.value is fault


def test_a_failed_transfer_comes_out_of_the_op_that_needs_it() -> None:
    class Broken(NoLinks):
        def wait(self) -> None:
            raise TransferError("cannot receive")

    program = place_communication(build_plan("zb-h1", num_ranks=2, num_microbatches=2))
    with pytest.raises(TransferError, match="cannot receive"):
        Executor(program, 1, Broken(), AnyWork()).run()


# -- what recorders are told -------------------------------------------------------------------------------------------


LABEL_BYTES = 12
"""Of the tensors that `LabelWork` gives: three float32."""


class GivingWork(LabelWork):
    """Accepts any result, because no links move anything here."""

    def _check(self, *given: object) -> None:
        """Anything goes."""


def expected_log(steps: tuple[Step, ...]) -> tuple[list[tuple[str, Message | Op]], list[int]]:
    """The log up to the last op, and how many tensors are between senders and takers after each op."""
    log: list[tuple[str, Message | Op]] = []
    flying, counts = 0, []
    for step in steps:
        log += [("posted", message) for message in step.post]
        log += [(what, message) for message in step.take for what in ("awaited", "taken")]
        log += [("retired", message) for message in step.retire]
        log += [(what, op) for what in ("start", "end") for op in step.ops]
        log += [("sent", message) for message in step.send]
        log += [("settled", op) for op in step.ops]
        flying += len(step.post) - len(step.take) - len(step.retire) + len(step.send)
        counts += [flying] * len(step.ops)
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
