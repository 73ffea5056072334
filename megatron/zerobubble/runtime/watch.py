"""What a rank is doing right now, for another thread to look at.

The thread that runs the passes tells a `Watch` what it begins; a watchdog looks now and then whether that changes. Nothing is
timed here, and telling costs no more than making a small object.

On the CPU a rank does what it was last told. On CUDA the host runs ahead: it has issued an op long before the device comes to it,
and where a device waits for a message that never comes, the host may already stand in the optimizer. So an event is recorded with
everything that is told, and what the device is doing is what was told before the first event that it has not come to. The host's
own place is the last thing told; both are the same where the device has caught up. Asking an event costs no synchronisation, but
is not allowed while a CUDA graph is being captured; nothing here captures one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.p2p import message_text
from megatron.zerobubble.runtime.recording import Recorder

__all__ = ["Doing", "Watch"]

_PASSES = {
    OpKind.F: "forward",
    OpKind.B: "input gradient",
    OpKind.W: "weight gradient",
    OpKind.BW: "backward",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Doing:
    """One thing that a rank does until it begins the next. Two that say the same are still two."""

    text: str
    """As in "it ...": what it does, with op, rank, stage and microbatch where it has them."""
    is_first: bool
    """Whether it is of the first iteration or the first evaluation, where things are compiled, opened and allocated."""


class Watch(Recorder):
    """Told by one thread what it does, asked by another.

    Args:
        device: where the passes run.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._told: deque[tuple[Doing | None, torch.cuda.Event | None]] = deque([(None, None)])
        self._begun = {False: 0, True: 0}
        self._is_first = True

    # -- by the thread that runs the passes -------------------------------------------------------------------------------

    @contextmanager
    def passes(self, *, forward_only: bool) -> Iterator[None]:
        """Around all passes of an iteration, or of an evaluation's. Afterwards the rank rests."""
        self._begun[forward_only] += 1
        self._is_first = self._begun[forward_only] == 1
        with self.doing("begins the passes"):
            yield

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Around something else that other ranks may be waited for in. Afterwards the rank rests."""
        self.tell(text)
        yield
        self._enter(None)  # not after an error: where it happened is to be told

    def text(self) -> str | None:
        """What the rank was last told to do; None while it rests."""
        doing, _ = self._told[-1]
        return None if doing is None else doing.text

    def tell(self, text: str) -> None:
        """The rank begins something."""
        self._enter(Doing(text=text, is_first=self._is_first))

    def start(self, op: Op) -> None:
        """An op begins."""
        self.tell(f"runs {op}, the {_PASSES[op.kind]} of stage {op.stage}, microbatch {op.microbatch}")

    def end(self, op: Op) -> None:
        """An op has ended."""
        self.tell(f"has run {op} and hands on its result")

    def awaited(self, message: Message) -> None:
        """The next op's input is waited for."""
        op = f"{message.stage}{'F' if message.payload is Payload.ACTIVATION else 'B'}{message.microbatch}"
        self.tell(f"waits, before {op}, to receive {message_text(message)}")

    def retiring(self, message: Message) -> None:
        """The other end of a send is waited for."""
        self.tell(f"waits until it has sent {message_text(message)}")

    def rewind(self) -> None:
        """Forwards are given up, and begin again."""
        self.tell("begins its first forwards again")

    def _enter(self, doing: Doing | None) -> None:
        if not self._is_cuda:
            self._told[0] = doing, None
            return
        event = torch.cuda.Event()
        event.record()
        self._told.append((doing, event))

    # -- by the thread that looks -----------------------------------------------------------------------------------------

    def standing(self) -> Doing | None:
        """What is being done now; None while the rank rests. Another object each time that something else is begun."""
        while len(self._told) > 1:
            event = self._told[1][1]
            if event is not None and not event.query():
                break
            self._told.popleft()
        return self._told[0][0]
