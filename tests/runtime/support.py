"""Work whose values prove what reached where, links between threads that an adversary delays, and ends that a test holds."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.zerobubble.plan.communication import Message, Payload, Program
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.recording import Recorder

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


class LabelWork:
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


Event = tuple[str, Message | Op]
"""What a rank did: ("post" | "take" | "retire" | "send", message) or ("op", op)."""


@dataclass(eq=False)
class Transfer:
    """One end of a transfer; the `Handle` that the executor holds."""

    message: Message
    tensor: Tensor
    sends: bool
    log: list[Event]
    waits: list[Message]
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait, and note for a send whether that was needed at all."""
        if self.sends and not self.done.is_set():
            self.waits.append(self.message)
        assert self.done.wait(PATIENCE_S), f"deadlock: {self.message} is still under way"
        self.log.append(("retire" if self.sends else "take", self.message))


class Fabric:
    """Links between threads without any buffer: a transfer needs both ends, in the order in which each end posted.

    A courier of its own carries them, one at a time, choosing among the links at random; the k-th send of a link goes into the
    k-th receive, whatever the two are called.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._change = threading.Condition()
        self._ends: dict[tuple[int, int], tuple[deque[Transfer], deque[Transfer]]] = {}
        self._closed = False
        self._courier = threading.Thread(target=self._carry, daemon=True)
        self._courier.start()

    def post(self, transfer: Transfer) -> None:
        """One end is there."""
        link = transfer.message.source, transfer.message.target
        with self._change:
            self._ends.setdefault(link, (deque(), deque()))[not transfer.sends].append(transfer)
            self._change.notify()

    def close(self) -> None:
        """End the courier; nothing may be under way."""
        with self._change:
            assert not any(end for ends in self._ends.values() for end in ends)
            self._closed = True
            self._change.notify()
        self._courier.join()

    def _carry(self) -> None:
        while True:
            with self._change:
                while not (ready := [ends for ends in self._ends.values() if ends[0] and ends[1]]) and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                sends, receives = self._random.choice(ready)
                send, receive = sends.popleft(), receives.popleft()
            if self._random.random() < 0.2:
                time.sleep(self._random.random() * 1e-3)
            receive.tensor.copy_(send.tensor)
            done = send.done, receive.done
            del send, receive  # the courier must not be what keeps a tensor alive
            for event in done:  # the sender's first: who has received may rely on it
                event.set()


class ThreadLinks:
    """One rank's `P2PLinks` on a fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.log: list[Event] = []
        self.waits: list[Message] = []
        """The sends that were waited for before they were done."""
        self.sent: list[weakref.ref[Tensor]] = []

    def send(self, message: Message, tensor: Tensor) -> Transfer:
        self.sent.append(weakref.ref(tensor))
        return self._start("send", message, tensor)

    def receive(self, message: Message, buffer: Tensor) -> Transfer:
        return self._start("post", message, buffer)

    def _start(self, verb: str, message: Message, tensor: Tensor) -> Transfer:
        self.log.append((verb, message))
        transfer = Transfer(message, tensor, verb == "send", self.log, self.waits)
        self._fabric.post(transfer)
        return transfer


class Watch(Recorder):
    """A recorder that counts, when an op starts, the sent tensors still alive."""

    def __init__(self, links: ThreadLinks) -> None:
        self._links = links
        self.alive: list[int] = []

    def start(self, op: Op) -> None:
        self._links.log.append(("op", op))
        self.alive.append(sum(tensor() is not None for tensor in self._links.sent))


@dataclass
class RankRun:
    """One rank of a run in threads, and what it saw."""

    executor: Executor
    work: LabelWork
    links: ThreadLinks
    watch: Watch


def run_in_threads(program: Program, seed: int, *, max_sleep_s: float = 0.0) -> list[RankRun]:
    """Execute a program with a thread for each rank; raises what a rank raises."""
    fabric = Fabric(seed)
    runs = []
    for rank in range(program.plan.num_ranks):
        links, work = ThreadLinks(fabric), LabelWork(program, max_sleep_s=max_sleep_s, seed=seed + rank)
        watch = Watch(links)
        runs.append(RankRun(Executor(program, rank, links, work, watch), work, links, watch))
    errors: list[BaseException] = []

    def target(run: RankRun) -> None:
        try:
            run.executor.run()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=target, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.1)
    if errors:
        raise errors[0]
    fabric.close()
    return runs


class NoLinks:
    """Transfers that are over at once and move nothing."""

    def send(self, message: Message, tensor: Tensor) -> NoLinks:
        return self

    def receive(self, message: Message, buffer: Tensor) -> NoLinks:
        return self

    def wait(self) -> None:
        """Done already."""


class Taken:
    """The backend: takes host memory, and is done when the test says so."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.called, self.waited, self.may_end = threading.Event(), threading.Event(), threading.Event()
        self.num_waits = 0
        self.given: list[float] = []
        self.host: Tensor | None = None

    def __call__(self, host: Tensor) -> Any:
        self.log.append("call")
        self.given.append(host[0].item())
        self.host = host
        self.called.set()
        return mock.Mock(wait=self._wait)

    def _wait(self) -> None:
        self.num_waits += 1
        self.waited.set()
        assert self.may_end.wait(PATIENCE_S)
