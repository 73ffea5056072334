"""When each op of one iteration really ran, and what the rank did beside its ops.

On the CPU an op runs on the calling thread, so two clock readings per op say everything. On CUDA an op is only issued by the
host: a pair of events per op is recorded on the current stream and read after the iteration, which does not stall the device.
Waits are waits of the stream there, and the pair of events around one says how long the stream stood still. A send begins in its
span no earlier than the event before it, because NCCL waits for the stream at the call; it ends somewhere before the event after.

Times are milliseconds on the host's monotonic clock, which the ranks of one host share; on CUDA the device's times are placed on
it by the moment of `clear`, which must therefore come first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.simulate import TimedOp
from megatron.zerobubble.plan.timeline import Activity, Bucket, RankTimeline, Span
from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.runtime.recording import Recorder


class Exchange:
    """A bucket under way between data-parallel ranks. Whoever issued it says when it is over, once."""

    __slots__ = ("activity", "bucket", "end", "marks", "start")

    def __init__(self, activity: Activity, bucket: Bucket, marks: Marks) -> None:
        self.activity, self.bucket, self.marks = activity, bucket, marks
        self.start = marks.now()
        self.end: Any = None

    def over(self) -> None:
        """It is over; on CUDA, for what is issued on the current stream from here on."""
        self.end = self.marks.now()


@dataclass
class _Tape:
    """What is recorded of one iteration: marks are seconds of the host's clock, or CUDA events."""

    origin_ms: float = 0.0
    origin_event: Any = None
    ops: list[tuple[Op, Any, Any]] = field(default_factory=list)
    spans: list[tuple[Activity, Message | None, Any, Any]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    def at(self, mark: Any) -> float:
        """Milliseconds on the host's clock. A CUDA event must be over."""
        if self.origin_event is None:
            return float(mark) * 1000.0
        return float(self.origin_ms + self.origin_event.elapsed_time(mark))


class OpRecorder(Recorder):
    """Records one rank. The executor tells it about ops and transfers, whoever owns an optimizer about the rest.

    Args:
        device: decides how time is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks = Marks(device)
        self._tape = _Tape()
        self._started: Any = None
        self._open: dict[tuple[Activity, Message], Any] = {}
        self._is_on = False

    @property
    def origin_ms(self) -> float:
        """Host monotonic clock at `clear`, in milliseconds: places ranks of one host on a common axis."""
        return self._tape.origin_ms

    def clear(self) -> None:
        """Forget what was recorded; the next op begins a new iteration, which is recorded until `pause`."""
        self._tape = _Tape()
        self._open.clear()
        if self._marks.on_cuda:
            self._marks.settle()
            self._tape.origin_event = self._marks.now()
        self._tape.origin_ms = time.perf_counter() * 1000.0
        self._is_on = True

    def pause(self) -> None:
        """The recorded iteration is over: spans are not recorded until `clear`. What was recorded stays."""
        self._is_on = False

    def rewind(self) -> None:
        """The ops so far were given up and run again: they and their transfers become one span."""
        tape = self._tape
        tape.spans = [span for span in tape.spans if span[1] is None]  # a rank without such ops has taken messages, too
        if tape.ops:
            tape.spans.append((Activity.REWIND, None, tape.ops[0][1], self._marks.now()))
        tape.ops = []
        self._open.clear()

    @contextmanager
    def span(self, activity: Activity) -> Iterator[None]:
        """Record what runs inside, while an iteration is being recorded."""
        if not self._is_on:
            yield
            return
        started = self._marks.now()
        yield
        self._tape.spans.append((activity, None, started, self._marks.now()))

    def exchange(self, activity: Activity, bucket: Bucket) -> Exchange | None:
        """A bucket's reduction or gathering is about to be issued; None while no iteration is being recorded."""
        if not self._is_on:
            return None
        exchange = Exchange(activity, bucket, self._marks)
        self._tape.exchanges.append(exchange)
        return exchange

    def start(self, op: Op) -> None:
        """The op is about to run."""
        self._started = self._marks.now()

    def end(self, op: Op) -> None:
        """The op's work has been issued (CUDA) or done (CPU)."""
        self._tape.ops.append((op, self._started, self._marks.now()))

    def posted(self, message: Message) -> None:
        """A receive has been posted."""
        self._open[Activity.RECEIVE, message] = self._marks.now()

    def awaited(self, message: Message) -> None:
        """The rank is about to wait for a receive."""
        self._open[Activity.WAIT, message] = self._marks.now()

    def taken(self, message: Message) -> None:
        """The message is here."""
        now = self._marks.now()
        self._close(Activity.WAIT, message, now)
        self._close(Activity.RECEIVE, message, now)

    def sent(self, message: Message) -> None:
        """A send is about to be issued."""
        self._open[Activity.SEND, message] = self._marks.now()

    def retired(self, message: Message) -> None:
        """A send is over."""
        self._close(Activity.SEND, message, self._marks.now())

    def timed_ops(self) -> list[TimedOp]:
        """What was recorded since `clear`, in the order it ran, on the host's monotonic clock. Synchronises a CUDA device."""
        return list(self.timeline().ops)

    def timeline(self) -> RankTimeline:
        """Ops and spans recorded since `clear`, on the host's monotonic clock. Synchronises a CUDA device."""
        self._marks.settle()
        tape = self._tape
        spans = [
            Span(activity=activity, message=message, start_ms=tape.at(start), end_ms=tape.at(end))
            for activity, message, start, end in tape.spans
        ]
        spans += [
            Span(activity=each.activity, bucket=each.bucket, start_ms=tape.at(each.start), end_ms=tape.at(each.end))
            for each in tape.exchanges
            if each.end is not None
        ]
        return RankTimeline(
            ops=tuple(TimedOp(op, tape.at(start), tape.at(end)) for op, start, end in tape.ops),
            spans=tuple(spans),
            peak_bytes=torch.cuda.max_memory_allocated() if self._marks.on_cuda else None,
        )

    def _close(self, activity: Activity, message: Message, now: Any) -> None:
        self._tape.spans.append((activity, message, self._open.pop((activity, message)), now))
