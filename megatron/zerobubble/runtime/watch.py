"""What a rank is doing right now, for a watchdog thread to read.

The main thread reports to a `Watch` what it begins: each op and transfer of the passes, and the phases around them, from joining
the job to the end. A watchdog checks now and then whether that changes. A report costs no more than making a small object.

The time of the ops of all passes is summed, without what the rank waits between them, so that a slow rank can be found.

On the CPU the rank is doing what was reported last. On CUDA the host runs ahead: it has issued an op long before the device
reaches it, and while the device waits for a message that never comes, the host may already be in the optimizer. So a CUDA event
is recorded with reports, and the device is doing what was reported before the first event that has not completed. The host's
own position is the last report; both are the same when the device has caught up. Ops that the host begins within `APART_S` of
the last event, with no wait between them, share it: short passes do not pay for events, and what the device is doing is known
to within these ops. Querying an event does not synchronize, but is not allowed while a CUDA graph is being captured; nothing
here captures one. The thread that queries has the rank's GPU as its current device (`threads`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.p2p import message_text
from megatron.zerobubble.runtime.recording import Recorder, op_text

__all__ = ["APART_S", "Doing", "Watch"]

_UP_TO = ", or an op behind it, up to "


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Doing:
    """What a rank is doing until its next report. Compared by identity: two with the same text are different reports."""

    text: str
    """A predicate whose subject is the rank, for example "waits until it has sent ...", with op, stage and microbatch if any."""
    is_first: bool
    """Whether it belongs to the first iteration or the first evaluation, in which code is compiled, connections are opened and
    memory is allocated."""
    is_waiting: bool = False
    """Whether it does nothing but wait for other ranks."""
    is_limited: bool = True
    """Whether it is part of the passes or of a step, which have a time limit; a phase around them has none."""
    waits_for: int | None = None
    """The global rank whose message it waits for, or that takes the message which it waits to have sent; None: nobody's."""
    is_op: bool = False
    """Whether it is an op of the passes."""
    is_shared: bool = False
    """Whether other ranks take part, so that it may last because of them."""


APART_S = 1e-3
"""Seconds of the host between two events of ops. Creating and recording an event takes it a few microseconds."""


class Watch(Recorder):
    """Holds what a rank is doing: one thread reports it, another one reads it.

    Args:
        device: the device on which the passes run.
        apart_s: see `APART_S`; 0: every op has an event.
    """

    def __init__(self, device: torch.device, *, apart_s: float = APART_S) -> None:
        self.device = device
        self._apart_s = apart_s
        self._event_s = 0.0
        self._position: Doing | None = None
        self._is_cuda = device.type == "cuda"
        self._reported: deque[tuple[Doing | None, torch.cuda.Event | None]] = deque([(None, None)])
        self._phase: Doing | None = None
        self._begun = {False: 0, True: 0}
        self._is_first = True
        self._pipeline: Sequence[int] | None = None
        self._op_began_s = 0.0
        self.busy_s = 0.0
        """Time of all ops so far, in seconds. On CUDA that of the ops that the device has passed when `current` looked last."""
        self.num_iterations = 0
        """Training iterations whose passes have begun."""

    # -- called by the thread that runs the passes ------------------------------------------------------------------------

    def begin_pipeline(self, pipeline: Sequence[int]) -> None:
        """A pipeline has been built: its next iteration and evaluation are first ones.

        Args:
            pipeline: the global ranks of this rank's pipeline, in its order; a `Message` names places in it.
        """
        self._pipeline = list(pipeline)
        self._begun = {False: 0, True: 0}
        self._is_first = True

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Wrap work outside of the passes; phases nest, and passes and steps inside of one have precedence.

        Args:
            text: see `Doing.text`.
        """
        outer = self._phase
        self._phase = Doing(text=text, is_first=False, is_limited=False)
        yield
        # A new object, as for every report; and not after an error: the phase shows where it happened.
        self._phase = None if outer is None else replace(outer)

    @contextmanager
    def passes(self, *, forward_only: bool) -> Iterator[None]:
        """Wrap all passes of a training or evaluation iteration. Afterwards the rank is idle."""
        self._begun[forward_only] += 1
        self.num_iterations += not forward_only
        self._is_first = self._begun[forward_only] == 1
        with self.doing("begins the passes"):
            yield

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Wrap other work in which this rank may wait for others. Afterwards the rank is idle."""
        self.report(text, is_shared=True)
        yield
        self._enter(None)  # not after an error: the last report shows where it happened

    def last(self) -> Doing | None:
        """The last report: the host's position; None outside of the passes and of all phases."""
        return self._position or self._phase

    @contextmanager
    def waits(self, text: str, peer: int | None = None) -> Iterator[None]:
        """Wrap a wait for other ranks, in which this one does nothing else. Afterwards the rank does what it did before.

        Args:
            text: see `Doing.text`.
            peer: the global rank that it waits for, if it is one.
        """
        before = self._position
        self._enter(Doing(text=text, is_first=self._is_first, is_waiting=True, is_limited=before is not None, waits_for=peer))
        yield
        self._enter(None if before is None else replace(before))  # not after an error, as in `doing`

    def report(self, text: str, *, is_shared: bool = False) -> None:
        """Report what the rank begins; see `Doing` for the arguments."""
        self._enter(Doing(text=text, is_first=self._is_first, is_shared=is_shared))

    def start(self, op: Op) -> None:
        """An op begins."""
        self._enter(Doing(text=f"runs {op_text(op)}", is_first=self._is_first, is_op=True), op)
        self._op_began_s = time.perf_counter()

    def end(self, op: Op) -> None:
        """An op has ended."""
        if not self._is_cuda:
            self.busy_s += time.perf_counter() - self._op_began_s
        self._enter(Doing(text=f"has run {op} and hands on its result", is_first=self._is_first), op)

    def awaited(self, message: Message) -> None:
        """The rank begins to wait for the next op's input."""
        kind = OpKind.F if message.payload is Payload.ACTIVATION else OpKind.B
        op = Op(message.stage, kind, message.microbatch, message.slice)
        self._wait(f"waits, before {op}, to receive {message_text(message)}", message.source)

    def retiring(self, message: Message) -> None:
        """The rank begins to wait for the end of a send."""
        self._wait(f"waits until it has sent {message_text(message)}", message.target)

    def rewind(self) -> None:
        """The rank rolls back: its first forwards are discarded and run again."""
        self.report("begins its first forwards again")

    def _wait(self, text: str, rank: int) -> None:
        peer = rank if self._pipeline is None else self._pipeline[rank]
        self._enter(Doing(text=text, is_first=self._is_first, is_waiting=True, waits_for=peer))

    def _enter(self, doing: Doing | None, op: Op | None = None) -> None:
        """Report `doing`; `op` is the one that begins or ends with it."""
        self._position = doing
        if not self._is_cuda:
            self._reported[0] = doing, None
            return
        now = time.perf_counter()
        if doing is not None and op is not None and now - self._event_s < self._apart_s:
            first, event = self._reported[-1]  # which the other thread leaves where it is
            if first is not None and first.is_op:
                if doing.is_op:
                    self._reported[-1] = replace(first, text=f"{first.text.partition(_UP_TO)[0]}{_UP_TO}{op}"), event
                return
        self._event_s = now
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._reported.append((doing, event))

    # -- called by the watchdog's threads, one at a time ------------------------------------------------------------------

    def current(self) -> Doing | None:
        """What the device is doing now; None outside of the passes and of all phases. A new object for every report."""
        while len(self._reported) > 1:
            (doing, begin), (_, end) = self._reported[0], self._reported[1]
            if end is not None and not end.query():
                break
            if doing is not None and doing.is_op and begin is not None and end is not None:
                self.busy_s += begin.elapsed_time(end) / 1000.0
            self._reported.popleft()
        return self._reported[0][0] or self._phase
