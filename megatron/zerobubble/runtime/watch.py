"""What a rank is doing right now, for a watchdog thread to read.

The main thread reports to a `Watch` what it begins: each op and transfer of the passes, and what is around them in a call of the
schedule. A watchdog checks now and then whether that changes. A report of an op or a transfer makes one small object,
which refers to the op or message; it becomes a `Doing`, with its text, when somebody reads it.

On the CPU the rank is doing what was reported last. On CUDA the host runs ahead: it has issued an op long before the device
reaches it, and while the device waits for a message that never comes, the host may already be in the optimizer. So a CUDA event
is recorded with reports, and the device is doing what was reported before the first event that has not completed. The host's
own position is the last report; both are the same when the device has caught up. A wait that follows the end of an op shares its
event: the device does nothing between the two. Ops that the host begins within `APART_S` of the last event, with no wait between
them, share it, too: short passes do not pay for events, and what the device is doing is known to within these ops. Querying an
event does not synchronize, but is not allowed while a CUDA graph is being captured: before, `quiesce` leaves none to be queried.
The thread that queries has the rank's GPU as its current device (`threads`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.p2p import message_text
from megatron.zerobubble.runtime.recording import Recorder, op_text

__all__ = ["APART_S", "Doing", "Watch"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Doing:
    """What a rank is doing until its next report. Compared by identity: two with the same text are different reports."""

    text: str
    """A predicate whose subject is the rank, for example "waits until it has sent ...", with op, stage and microbatch if any."""
    is_first: bool
    """Whether it belongs to the first iteration or the first evaluation, in which code is compiled, connections are opened and
    memory is allocated."""
    is_waiting: bool = False
    """Whether it lasts until other ranks have done their part."""
    is_limited: bool = True
    """Whether it is part of the passes or of a step, which have a time limit; a phase around them has none."""
    waits_for: int | None = None
    """The global rank whose message it waits for, or that takes the message which it waits to have sent; None: nobody's."""


class _Event(Enum):
    BEGUN = auto()
    ENDED = auto()
    AWAITED = auto()
    RETIRING = auto()


class _Report:
    """An event of the passes, as the thread that runs them stores it. Each event has an object of its own."""

    __slots__ = ("doing", "event", "is_first", "of", "until")

    def __init__(self, event: _Event, of: Op | Message, is_first: bool, until: Op | None = None) -> None:
        self.event, self.of, self.is_first = event, of, is_first
        self.until = until
        """The last op that shares the event of this one."""
        self.doing: Doing | None = None
        """What was read before."""

    def read(self, pipeline: Sequence[int] | None) -> Doing:
        """In words; the same object every time."""
        if self.doing is None:
            self.doing = self._of_op(self.of) if isinstance(self.of, Op) else self._of_message(self.of, pipeline)
        return self.doing

    def _of_op(self, op: Op) -> Doing:
        if self.event is _Event.ENDED:
            return Doing(text=f"has run {op} and hands on its result", is_first=self.is_first)
        more = "" if self.until is None else f", or an op behind it, up to {self.until}"
        return Doing(text=f"runs {op_text(op)}{more}", is_first=self.is_first)

    def _of_message(self, message: Message, pipeline: Sequence[int] | None) -> Doing:
        rank = message.source if self.event is _Event.AWAITED else message.target
        text = f"waits until it has sent {message_text(message)}"
        if self.event is _Event.AWAITED:
            kind = OpKind.F if message.payload is Payload.ACTIVATION else OpKind.B
            op = Op(message.stage, kind, message.microbatch, message.slice)
            text = f"waits, before {op}, to receive {message_text(message)}"
        peer = rank if pipeline is None else pipeline[rank]
        return Doing(text=text, is_first=self.is_first, is_waiting=True, waits_for=peer)


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
        self._position: Doing | _Report | None = None
        self._is_cuda = device.type == "cuda"
        self._reported: deque[tuple[Doing | _Report | None, torch.cuda.Event | None]] = deque([(None, None)])
        """On CUDA what was reported and is not over on the device, each with the event that was recorded before it."""
        self._phase: Doing | None = None
        self._begun = {False: 0, True: 0}
        self._is_first = True
        self._pipeline: Sequence[int] | None = None

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
        self._is_first = self._begun[forward_only] == 1
        with self.doing("begins the passes"):
            yield

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Wrap other work that all ranks do together. Afterwards the rank is idle."""
        self.report(text, is_waiting=True)
        yield
        self._enter(None)  # not after an error: the last report shows where it happened

    def quiesce(self) -> None:
        """Call when the device is idle: no event is queried until the next report."""
        self._reported = deque([(self._reported[-1][0], None)])

    def last(self) -> Doing | None:
        """The last report: the host's position; None outside of the passes and of all phases."""
        return self._read(self._position) or self._phase

    @contextmanager
    def waits(self, text: str, peer: int | None = None) -> Iterator[None]:
        """Wrap a wait for other ranks, in which this one does nothing else. Afterwards the rank does what it did before.

        Args:
            text: see `Doing.text`.
            peer: the global rank that it waits for, if it is one.
        """
        before = self._read(self._position)
        self._enter(Doing(text=text, is_first=self._is_first, is_waiting=True, is_limited=before is not None, waits_for=peer))
        yield
        self._enter(None if before is None else replace(before))  # not after an error, as in `doing`

    def report(self, text: str, *, is_waiting: bool = False) -> None:
        """Report what the rank begins; see `Doing` for the arguments."""
        self._enter(Doing(text=text, is_first=self._is_first, is_waiting=is_waiting))

    def start(self, op: Op) -> None:
        """An op begins."""
        self._enter_passes(_Event.BEGUN, op)

    def end(self, op: Op) -> None:
        """An op has ended."""
        self._enter_passes(_Event.ENDED, op)

    def awaited(self, message: Message) -> None:
        """The rank begins to wait for the next op's input."""
        self._enter_passes(_Event.AWAITED, message)

    def retiring(self, message: Message) -> None:
        """The rank begins to wait for the end of a send."""
        self._enter_passes(_Event.RETIRING, message)

    def rewind(self) -> None:
        """The rank rolls back: its first forwards are discarded and run again."""
        self.report("begins its first forwards again")

    def _enter_passes(self, event: _Event, of: Op | Message) -> None:
        report = _Report(event, of, self._is_first)
        if not self._is_cuda:
            self._position = report
        elif not self._shares(report):
            self._enter(report)

    def _shares(self, report: _Report) -> bool:
        """Give an event of the passes the CUDA event of the one before, if they may share it."""
        first, event = self._reported[-1]  # which the other thread leaves where it is
        if not isinstance(first, _Report):
            return False
        if isinstance(report.of, Message):
            if first.event is not _Event.ENDED:
                return False
            self._position = report
            self._reported[-1] = report, event
            return True
        if first.event is not _Event.BEGUN or time.perf_counter() - self._event_s >= self._apart_s:
            return False
        self._position = report
        if report.event is _Event.BEGUN:
            self._reported[-1] = _Report(_Event.BEGUN, first.of, first.is_first, report.of), event
        return True

    def _enter(self, doing: Doing | _Report | None) -> None:
        """Report `doing`."""
        self._position = doing
        if not self._is_cuda:
            return
        self._event_s = time.perf_counter()
        event = torch.cuda.Event()
        event.record()
        self._reported.append((doing, event))

    def _read(self, reported: Doing | _Report | None) -> Doing | None:
        return reported.read(self._pipeline) if isinstance(reported, _Report) else reported

    # -- called by the watchdog's thread ----------------------------------------------------------------------------------

    def current(self) -> Doing | None:
        """What the device is doing now; None outside of the passes and of all phases. A new object for every report."""
        queue = self._reported  # `quiesce` may replace it
        while len(queue) > 1 and ((end := queue[1][1]) is None or end.query()):
            queue.popleft()
        return self._read(queue[0][0] if self._is_cuda else self._position) or self._phase
