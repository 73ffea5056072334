"""The walk over a plan's ops on one rank.

The executor knows ops and messages; it knows no schedule by name, no model and no optimizer. What an op computes is a
`StageWork`'s business, how a tensor travels a `Links`'s. It keeps received buffers until their op takes them, tensors being
sent until they are proven to have arrived, and tensors handed from one stage to the next on the same rank. All three are empty
when `run` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.communication import Message, Payload, Program, Step
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.p2p import Handle, Links
from megatron.zerobubble.runtime.recording import RecordedLinks, Recorder


class StageWork(Protocol):
    """What the ops compute, for the stages of one rank."""

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor | None:
        """F. Takes the previous stage's output (None for the first stage), returns what the next stage takes."""

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
        """B or BW. Takes the gradient of this stage's output (None for the last stage), returns that of its input."""

    def weight_gradient(self, op: Op, last: bool) -> None:
        """W."""

    def buffer(self, message: Message) -> Tensor:
        """A fresh tensor of the shape and dtype of `message`."""


class Executor:
    """Runs one rank's part of a `Program`.

    Args:
        program: the plan with its transfers placed.
        rank: pipeline rank.
        links: transfers to other ranks.
        work: what the ops compute.
        recorder: told about every op and transfer, if given.
    """

    def __init__(self, program: Program, rank: int, links: Links, work: StageWork, recorder: Recorder | None = None) -> None:
        self._steps = program.steps[rank]
        self._next = 0
        self._stage_to_rank = program.plan.placement.stage_to_rank
        self._rank = rank
        self._recorded = None if recorder is None else RecordedLinks(links, recorder)
        self._links: Links = self._recorded or links
        self._work = work
        self._recorder = recorder
        self._receiving: dict[Message, tuple[Tensor, Handle]] = {}
        self._sending: dict[Message, Handle] = {}
        self._local: dict[tuple[Payload, int, int], Tensor] = {}

    def begin(self, count: int) -> None:
        """Execute the first `count` ops, after which `run` goes on or `abandon` gives up."""
        for step in self._steps[:count]:
            self._run_step(step)
        self._next = count

    def abandon(self, unread: Sequence[Message]) -> None:
        """Leave nothing under way: take the `unread` messages that others have sent, and wait for this rank's own to be taken."""
        buffers = [self._work.buffer(message) for message in unread]
        handles = [self._links.receive(message, buffer) for message, buffer in zip(unread, buffers, strict=True)]
        for handle in (*handles, *self._sending.values()):
            handle.wait()
        self._sending.clear()
        if self._receiving:
            raise ExecutionError(f"rank {self._rank}: a receive of {next(iter(self._receiving))} is posted and nobody sends it")

    def run(self) -> None:
        """Execute every op of this rank that has not run, and wait for the last sends."""
        for step in self._steps[self._next :]:
            self._run_step(step)
        for handle in self._sending.values():
            handle.wait()
        self._sending.clear()
        if self._receiving or self._local:
            left = [*self._receiving, *self._local]
            raise ExecutionError(f"rank {self._rank}: nobody took {left[0]} and {len(left) - 1} more; the plan is incomplete")

    def _run_step(self, step: Step) -> None:
        op = step.op
        for message in step.post:
            buffer = self._work.buffer(message)
            self._receiving[message] = buffer, self._links.receive(message, buffer)
        tensor = self._take(step)
        for message in step.retire:
            self._sending.pop(message).wait()
        if self._recorder is not None:
            self._recorder.start(op)
        if op.kind is OpKind.F:
            result = self._work.forward(op, tensor, step.last_of_kind)
        elif op.kind is OpKind.W:
            self._work.weight_gradient(op, step.last_of_kind)
            result = None
        else:
            result = self._work.backward(op, tensor, step.last_of_kind)
        if self._recorder is not None:
            self._recorder.end(op)
        if op.kind is not OpKind.W:
            self._give(step, result)
        if self._recorder is not None:
            del tensor, result  # what is held from here on is what the plan says is held
            self._recorder.settled(op, self._in_transit)

    def _in_transit(self) -> int:
        assert self._recorded is not None
        return self._recorded.in_transit_bytes + sum(tensor.nbytes for tensor in self._local.values())

    def _take(self, step: Step) -> Tensor | None:
        if step.take is not None:
            tensor, handle = self._receiving.pop(step.take)
            handle.wait()
            return tensor
        if step.op.kind is OpKind.W:
            return None
        payload = Payload.ACTIVATION if step.op.kind is OpKind.F else Payload.GRADIENT
        return self._local.pop((payload, step.op.stage, step.op.microbatch), None)

    def _give(self, step: Step, result: Tensor | None) -> None:
        op = step.op
        payload, stage = (Payload.ACTIVATION, op.stage + 1) if op.kind is OpKind.F else (Payload.GRADIENT, op.stage - 1)
        if not 0 <= stage < len(self._stage_to_rank):
            return
        if result is None:
            raise ExecutionError(
                f"rank {self._rank}: {op} returned no tensor, and rank {self._stage_to_rank[stage]} would wait for ever for the "
                f"{payload.value} for stage {stage}, microbatch {op.microbatch}. Does the stage's output depend on its input?"
            )
        if step.send is not None:
            self._sending[step.send] = self._links.send(step.send, result)
        else:
            self._local[payload, stage, op.microbatch] = result
