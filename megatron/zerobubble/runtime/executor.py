"""The executor: runs the ops of a plan on one rank.

It depends on ops and messages only, not on a schedule, a model or an optimizer. `StageWork` computes an op, `P2PLinks` transfers
tensors. The executor owns received buffers until their op takes them, tensors being sent until they have arrived, and tensors
handed from one stage to the next on the same rank. All three are empty when `run` returns. Both ops of a pair have their inputs
before it, and both results are sent after it. An exception of an op has a note that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.communication import Message, Payload, Program, Step
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.p2p import Handle, P2PLinks
from megatron.zerobubble.runtime.recording import RecordedLinks, Recorder, op_text

Pass = tuple[Op, Tensor | None, bool]
"""The arguments with which `StageWork` computes an op."""


class StageWork(Protocol):
    """Computes the ops of one rank's stages. `last` is True for the rank's last op of its kind in the iteration."""

    def pair(self, forward: Pass, backward: Pass) -> tuple[Tensor | None, Tensor | None]:
        """Run the F and the B or BW of a pair, here one after the other, and return the results of both."""
        return self.forward(*forward), self.backward(*backward)

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor | None:
        """Run F: takes the previous stage's output (None for the first stage), returns the next stage's input."""

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
        """Run B (dgrad) or BW: takes the gradient of this stage's output (None for the last stage), returns that of its input."""

    def weight_gradient(self, op: Op, last: bool) -> None:
        """Run W (wgrad)."""

    def buffer(self, message: Message) -> Tensor:
        """Allocate a tensor of the shape and dtype of `message` to receive into."""


class Executor:
    """Runs one rank's part of a `Program`.

    Args:
        program: the plan with its transfers placed.
        rank: pipeline rank.
        links: transfers tensors to and from other ranks.
        work: computes the ops.
        recorder: receives the events of every op and transfer, if given.
    """

    def __init__(self, program: Program, rank: int, links: P2PLinks, work: StageWork, recorder: Recorder | None = None) -> None:
        self._steps = program.steps[rank]
        self._next = 0
        self._stage_to_rank = program.plan.placement.stage_to_rank
        self._rank = rank
        self._recorded = None if recorder is None else RecordedLinks(links, recorder)
        self._links: P2PLinks = self._recorded or links
        self._work = work
        self._recorder = recorder
        self._receiving: dict[Message, tuple[Tensor, Handle]] = {}
        self._sending: dict[Message, Handle] = {}
        self._local: dict[tuple[Payload, int, int, int], Tensor] = {}

    def begin(self, count: int) -> None:
        """Execute the first `count` ops. Then either `run` executes the rest or `abandon` ends the iteration."""
        self._run_steps(self._steps[:count])
        self._next = count

    def abandon(self, unread: Sequence[Message]) -> None:
        """End the iteration after `begin` with no transfer under way.

        Args:
            unread: messages to this rank that other ranks have sent and no op here has received; they are received and dropped.

        Raises:
            ExecutionError: a receive is posted that no rank sends.
        """
        buffers = [self._work.buffer(message) for message in unread]
        handles = [self._links.receive(message, buffer) for message, buffer in zip(unread, buffers, strict=True)]
        for handle in (*handles, *self._sending.values()):
            handle.wait()
        self._sending.clear()
        if self._receiving:
            raise ExecutionError(f"rank {self._rank}: a receive of {next(iter(self._receiving))} is posted and no rank sends it")

    def run(self) -> None:
        """Execute the remaining ops of this rank, and wait for the last sends.

        Raises:
            ExecutionError: an op returned no tensor for the next stage, or a tensor is left that no op takes.
        """
        self._run_steps(self._steps[self._next :])
        for handle in self._sending.values():
            handle.wait()
        self._sending.clear()
        if self._receiving or self._local:
            left = [*self._receiving, *self._local]
            raise ExecutionError(f"rank {self._rank}: no op took {left[0]} and {len(left) - 1} more; the plan is incomplete")

    def _run_steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            try:
                self._run_step(step)
            except Exception as error:
                error.add_note(f"pipeline rank {self._rank}, at {', beside '.join(map(op_text, step.ops))}")
                raise

    def _run_step(self, step: Step) -> None:
        for message in step.post:
            self._post(message)
        tensor = self._take(step)
        for message in step.retire:
            self._sending.pop(message).wait()
        op, last = step.ops[0], step.last_of_kind[0]
        if len(step.ops) > 1:
            self._run_pair(step, (op, tensor, last))
            return
        if self._recorder is not None:
            self._recorder.start(op)
        if op.kind is OpKind.F:
            result = self._work.forward(op, tensor, last)
        elif op.kind is OpKind.W:
            self._work.weight_gradient(op, last)
            result = None
        else:
            result = self._work.backward(op, tensor, last)
        if self._recorder is not None:
            self._recorder.end(op)
        if op.kind is not OpKind.W:
            self._give(step, op, result)
        if self._recorder is not None:
            del tensor, result  # from here on only what the plan counts as activation memory is held
            self._recorder.settled(op, self._in_transit)

    def _run_pair(self, step: Step, forward: Pass) -> None:
        backward = step.ops[1], self._kept(step.ops[1]), step.last_of_kind[1]
        if self._recorder is not None:
            for op in step.ops:
                self._recorder.start(op)
        results = self._work.pair(forward, backward)
        if self._recorder is not None:
            for op in step.ops:
                self._recorder.end(op)
        for op, result in zip(step.ops, results, strict=True):
            self._give(step, op, result)
        del forward, backward, results, result
        if self._recorder is not None:
            for op in step.ops:
                self._recorder.settled(op, self._in_transit)

    def _post(self, message: Message) -> None:
        # Not in `_run_step`, where a name would keep the buffer until the end of the step that also takes the message.
        buffer = self._work.buffer(message)
        self._receiving[message] = buffer, self._links.receive(message, buffer)

    def _in_transit(self) -> int:
        assert self._recorded is not None
        return self._recorded.in_transit_bytes + sum(tensor.nbytes for tensor in self._local.values())

    def _take(self, step: Step) -> Tensor | None:
        """What the step's first op takes. What is taken for another op is kept for it."""
        op, tensor = step.ops[0], None
        for message in step.take:
            received = self._received_of(message)
            if (message.payload is Payload.ACTIVATION) is (op.kind is OpKind.F):
                tensor = received
            else:
                self._local[message.payload, message.stage, message.microbatch, message.slice] = received
        return self._kept(op) if tensor is None and op.kind is not OpKind.W else tensor

    def _received_of(self, message: Message) -> Tensor:
        tensor, handle = self._receiving.pop(message)
        handle.wait()
        return tensor

    def _kept(self, op: Op) -> Tensor | None:
        payload = Payload.ACTIVATION if op.kind is OpKind.F else Payload.GRADIENT
        return self._local.pop((payload, op.stage, op.microbatch, op.slice), None)

    def _give(self, step: Step, op: Op, result: Tensor | None) -> None:
        payload, stage = (Payload.ACTIVATION, op.stage + 1) if op.kind is OpKind.F else (Payload.GRADIENT, op.stage - 1)
        if not 0 <= stage < len(self._stage_to_rank):
            return
        if result is None:
            raise ExecutionError(
                f"rank {self._rank}: {op} returned no tensor, and rank {self._stage_to_rank[stage]} would wait forever for the "
                f"{payload.value} for {op._replace(stage=stage).where}. Does the stage's output depend on its input?"
            )
        for message in step.send:
            if message.payload is payload:
                self._sending[message] = self._links.send(message, result)
                return
        self._local[payload, stage, op.microbatch, op.slice] = result


class BatchedExecutor(Executor):
    """An executor whose transfers between two ops are over before the next one, also those for later ops.

    It is for batched links (`p2p`), where the first wait begins all of them. Arguments are those of `Executor`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps = tuple(replace(step, retire=()) for step in self._steps)  # every send is over at the next op
        self._received: dict[Message, Tensor] = {}

    def begin(self, count: int) -> None:
        """Execute the first `count` ops, and end the batch behind them."""
        super().begin(count)
        self._end_batch()

    def _take(self, step: Step) -> Tensor | None:
        self._end_batch()
        return super()._take(step)

    def _received_of(self, message: Message) -> Tensor:
        return self._received.pop(message)

    def _end_batch(self) -> None:
        for handle in self._sending.values():
            handle.wait()
        self._sending.clear()
        for message, (buffer, handle) in self._receiving.items():
            handle.wait()
            self._received[message] = buffer
        self._receiving.clear()

    def _in_transit(self) -> int:
        return super()._in_transit() + sum(tensor.nbytes for tensor in self._received.values())
