"""Work whose values prove what reached where, links that move nothing, and a backend that is done when a test says so."""

from __future__ import annotations

import random
import time
import weakref

import torch
from torch import Tensor

from megatron.zerobubble.plan.communication import Message, Payload, Program
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.executor import StageWork

PATIENCE_S = 90.0
"""How long a transfer may take before a test calls it a deadlock."""


CPU = torch.device("cpu")
CYCLES_PER_S = 1e9
"""About those of a GPU's clock."""


def label(payload: Payload, stage: int, microbatch: int, device: torch.device = CPU) -> Tensor:
    """The tensor that the given op takes, and no other op."""
    values = torch.empty(3, device=device)
    for index, value in enumerate((float(payload is Payload.GRADIENT), stage, microbatch)):
        values[index] = value  # on CUDA a kernel; a tensor made of a list would be copied, and the host wait for its stream
    return values


class LabelWork(StageWork):
    """A `StageWork` that checks what it is given and gives what the next op must be given.

    Args:
        program: what is run.
        max_sleep_s: ops sleep up to this long; on CUDA the host and the stream do, each as long as it likes.
        seed: of the sleeps.
        device: where tensors live. On CUDA nothing waits for the stream: what arrived is looked at in `settle`.
    """

    def __init__(self, program: Program, *, max_sleep_s: float = 0.0, seed: int = 0, device: torch.device = CPU) -> None:
        self.plan = program.plan
        self._device = device
        self._arrived: list[tuple[Op, Tensor, Payload]] = []
        self.ops: list[Op] = []
        self.buffers_alive = 0
        self.most_buffers_alive = 0
        self._max_sleep_s = max_sleep_s
        self._random = random.Random(seed)

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor | None:
        assert op.kind is OpKind.F
        self._check(op, Payload.ACTIVATION, activation, op.stage == 0, last)
        return (
            None if op.stage == self.plan.num_stages - 1 else label(Payload.ACTIVATION, op.stage + 1, op.microbatch, self._device)
        )

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
        assert op.kind in (OpKind.B, OpKind.BW)
        self._check(op, Payload.GRADIENT, gradient, op.stage == self.plan.num_stages - 1, last)
        return None if op.stage == 0 else label(Payload.GRADIENT, op.stage - 1, op.microbatch, self._device)

    def weight_gradient(self, op: Op, last: bool) -> None:
        assert op.kind is OpKind.W
        self._check(op, Payload.GRADIENT, None, True, last)

    def buffer(self, message: Message) -> Tensor:
        buffer = torch.full((3,), float("nan"), device=self._device)
        self._count(buffer)
        return buffer

    def _count(self, buffer: Tensor) -> None:
        self.buffers_alive += 1
        self.most_buffers_alive = max(self.most_buffers_alive, self.buffers_alive)
        weakref.finalize(buffer, self._free)

    def settle(self) -> None:
        """Look at what arrived on a stream."""
        for op, given, payload in self._arrived:
            assert torch.equal(given.cpu(), label(payload, op.stage, op.microbatch)), f"{op} was given {given.tolist()}"
        self._arrived.clear()

    def _free(self) -> None:
        self.buffers_alive -= 1

    def _check(self, op: Op, payload: Payload, given: Tensor | None, takes_nothing: bool, last: bool) -> None:
        if takes_nothing:
            assert given is None, f"{op} was given {given}"
        else:
            assert given is not None, f"{op} was given nothing"
            # A copy holds what the stream finds in the buffer now, and not what is in it when somebody looks.
            self._arrived.append((op, given.clone(), payload))
            if self._device.type == "cpu":
                self.settle()
        assert last == (op.microbatch == self.plan.num_microbatches - 1)
        self.ops.append(op)
        if self._max_sleep_s:
            time.sleep(self._random.random() * self._max_sleep_s)
            if self._device.type == "cuda":
                torch.cuda._sleep(int(self._random.random() * self._max_sleep_s * CYCLES_PER_S))


class NoLinks:
    """Transfers that are over at once and move nothing."""

    def send(self, message: Message, tensor: Tensor) -> NoLinks:
        return self

    def receive(self, message: Message, buffer: Tensor) -> NoLinks:
        return self

    def wait(self) -> None:
        """Done already."""
