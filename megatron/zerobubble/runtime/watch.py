"""What a rank is doing right now, for a watchdog thread to read.

The thread that runs the passes reports to a `Watch` what it begins; a watchdog checks now and then whether that changes. Nothing
is timed here, and a report costs no more than making a small object.

On the CPU the rank is doing what was reported last. On CUDA the host runs ahead: it has issued an op long before the device
reaches it, and while the device waits for a message that never comes, the host may already be in the optimizer. So a CUDA event
is recorded with every report, and the device is doing what was reported before the first event that has not completed. The host's
own position is the last report; both are the same when the device has caught up. Querying an event does not synchronize, but is
not allowed while a CUDA graph is being captured; nothing here captures one. The thread that queries has the rank's GPU as its
current device (`threads`).
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
    OpKind.B: "dgrad",
    OpKind.W: "wgrad",
    OpKind.BW: "full backward",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Doing:
    """What a rank is doing until its next report. Compared by identity: two with the same text are different reports."""

    text: str
    """A predicate whose subject is the rank, for example "waits until it has sent ...", with op, stage and microbatch if any."""
    is_first: bool
    """Whether it belongs to the first iteration or the first evaluation, in which code is compiled, connections are opened and
    memory is allocated."""


class Watch(Recorder):
    """Holds what a rank is doing: one thread reports it, another one reads it.

    Args:
        device: the device on which the passes run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._reported: deque[tuple[Doing | None, torch.cuda.Event | None]] = deque([(None, None)])
        self._begun = {False: 0, True: 0}
        self._is_first = True

    # -- called by the thread that runs the passes ------------------------------------------------------------------------

    @contextmanager
    def passes(self, *, forward_only: bool) -> Iterator[None]:
        """Wrap all passes of a training or evaluation iteration. Afterwards the rank is idle."""
        self._begun[forward_only] += 1
        self._is_first = self._begun[forward_only] == 1
        with self.doing("begins the passes"):
            yield

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Wrap other work in which this rank may wait for others. Afterwards the rank is idle."""
        self.report(text)
        yield
        self._enter(None)  # not after an error: the last report shows where it happened

    def text(self) -> str | None:
        """The text of the last report: the host's position; None while the rank is idle."""
        doing, _ = self._reported[-1]
        return None if doing is None else doing.text

    def report(self, text: str) -> None:
        """Report what the rank begins; see `Doing.text`."""
        self._enter(Doing(text=text, is_first=self._is_first))

    def start(self, op: Op) -> None:
        """An op begins."""
        self.report(f"runs {op}, the {_PASSES[op.kind]} of stage {op.stage}, microbatch {op.microbatch}")

    def end(self, op: Op) -> None:
        """An op has ended."""
        self.report(f"has run {op} and hands on its result")

    def awaited(self, message: Message) -> None:
        """The rank begins to wait for the next op's input."""
        op = f"{message.stage}{'F' if message.payload is Payload.ACTIVATION else 'B'}{message.microbatch}"
        self.report(f"waits, before {op}, to receive {message_text(message)}")

    def retiring(self, message: Message) -> None:
        """The rank begins to wait for the end of a send."""
        self.report(f"waits until it has sent {message_text(message)}")

    def rewind(self) -> None:
        """The rank rolls back: its first forwards are discarded and run again."""
        self.report("begins its first forwards again")

    def _enter(self, doing: Doing | None) -> None:
        if not self._is_cuda:
            self._reported[0] = doing, None
            return
        event = torch.cuda.Event()
        event.record()
        self._reported.append((doing, event))

    # -- called by the watchdog thread ------------------------------------------------------------------------------------

    def current(self) -> Doing | None:
        """What the device is doing now; None while the rank is idle. A new object for every report."""
        while len(self._reported) > 1:
            event = self._reported[1][1]
            if event is not None and not event.query():
                break
            self._reported.popleft()
        return self._reported[0][0]
