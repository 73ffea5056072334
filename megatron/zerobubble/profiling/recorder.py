"""Record when each op of one iteration ran on a rank, with its transfers, waits and optimizer spans.

On the CPU an op runs on the calling thread, so two clock readings per op suffice. On CUDA an op is only issued by the host: a
pair of events per op is recorded on the current stream and read after the iteration, which does not stall the device. Waits are
waits of the stream there, and the pair of events around one measures how long the stream was blocked. A send begins no earlier
than the first event of its span, because NCCL waits for the stream at the call; it ends some time before the second one.

Times are milliseconds on the host's monotonic clock, which the ranks of one host share; on CUDA the device's times are mapped to
it at the moment of `clear`, which must therefore come first.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.simulate import TimedOp, seconds_of_pairs
from megatron.zerobubble.plan.timeline import Activity, Bucket, RankTimeline, Span
from megatron.zerobubble.profiling.exposed import exposed
from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.runtime.recording import Recorder


class Exchange:
    """A collective on one bucket between data-parallel ranks. The code that issued it calls `over` once."""

    __slots__ = ("activity", "bucket", "end", "marks", "start")

    def __init__(self, activity: Activity, bucket: Bucket, marks: Marks) -> None:
        self.activity, self.bucket, self.marks = activity, bucket, marks
        self.start = marks.now()
        self.end: Any = None

    def over(self) -> None:
        """Record the end of the collective; on CUDA, its end for work issued on the current stream from here on."""
        self.end = self.marks.now()


@dataclass
class _Tape:
    """The marks of one iteration: seconds of the host's clock, or CUDA events."""

    origin_ms: float = 0.0
    origin_event: Any = None
    ops: list[tuple[Op, Any, Any]] = field(default_factory=list)
    spans: list[tuple[Activity, Message | None, Any, Any]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    changes: list[tuple[Any, int]] = field(default_factory=list)

    def at(self, mark: Any) -> float:
        """Milliseconds on the host's clock. A CUDA event must have completed."""
        if self.origin_event is None:
            return float(mark) * 1000.0
        return float(self.origin_ms + self.origin_event.elapsed_time(mark))


class OpRecorder(Recorder):
    """Records one rank: the executor reports ops and transfers, the schedule and the optimizer enter `span` for the rest.

    Args:
        device: decides how time is measured.
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

    @property
    def is_on(self) -> bool:
        """Whether an iteration is being recorded."""
        return self._is_on

    def clear(self) -> None:
        """Discard the recording; the next op begins a new iteration, which is recorded until `pause`."""
        self._tape = _Tape()
        self._open.clear()
        if self._marks.on_cuda:
            self._marks.synchronize()
            self._tape.origin_event = self._marks.now()
        self._tape.origin_ms = time.perf_counter() * 1000.0
        self._is_on = True

    def pause(self) -> None:
        """The recorded iteration is over: record no spans until `clear`. The recording stays."""
        self._is_on = False

    def rewind(self) -> None:
        """The ops so far are discarded and run again: they and their transfers become one span."""
        tape = self._tape
        tape.spans = [span for span in tape.spans if span[1] is None]  # a rank without such ops has received messages, too
        if tape.ops:
            tape.spans.append((Activity.REWIND, None, tape.ops[0][1], self._marks.now()))
        tape.ops = []
        self._open.clear()

    @contextmanager
    def span(self, activity: Activity) -> Iterator[None]:
        """Record the body of the `with` statement as a span, while an iteration is being recorded."""
        if not self._is_on:
            yield
            return
        started = self._marks.now()
        yield
        self._tape.spans.append((activity, None, started, self._marks.now()))

    def exchange(self, activity: Activity, bucket: Bucket) -> Exchange | None:
        """Record a bucket's collective, which is about to be issued; None while no iteration is being recorded."""
        if not self._is_on:
            return None
        exchange = Exchange(activity, bucket, self._marks)
        self._tape.exchanges.append(exchange)
        return exchange

    def computes(self, change: int) -> None:
        """Inside of ops one more pass or wgrad GEMM computes from here on (1), or one less (-1)."""
        self._tape.changes.append((self._marks.now(), change))

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
        """The ops recorded since `clear`, in the order they ran, on the host's monotonic clock. Synchronizes a CUDA device."""
        return list(self.timeline().ops)

    def timeline(self) -> RankTimeline:
        """Ops and spans recorded since `clear`, on the host's monotonic clock. Synchronizes a CUDA device."""
        return self.reader()()

    def reader(self) -> Callable[[], RankTimeline]:
        """What is recorded now, to be read later: only the function that is returned synchronizes a CUDA device."""
        tape, ops = self._tape, tuple(self._tape.ops)
        spans = tuple(tape.spans)
        exchanges = [(each.activity, each.bucket, each.start, each.end) for each in tape.exchanges if each.end is not None]
        changes = tuple(tape.changes)
        peak_bytes = torch.cuda.max_memory_allocated() if self._marks.on_cuda else None

        def read() -> RankTimeline:
            self._marks.synchronize()
            found = [
                Span(activity=activity, message=message, start_ms=tape.at(start), end_ms=tape.at(end))
                for activity, message, start, end in spans
            ]
            found += [
                Span(activity=activity, bucket=bucket, start_ms=tape.at(start), end_ms=tape.at(end))
                for activity, bucket, start, end in exchanges
            ]
            timed = tuple(TimedOp(op, tape.at(start), tape.at(end)) for op, start, end in ops)
            return RankTimeline(
                ops=timed,
                spans=(*found, *_all_to_alls(timed, [(tape.at(mark), change) for mark, change in changes])),
                peak_bytes=peak_bytes,
            )

        return read

    def _close(self, activity: Activity, message: Message, now: Any) -> None:
        self._tape.spans.append((activity, message, self._open.pop((activity, message)), now))


def _all_to_alls(row: Sequence[TimedOp], changes: Sequence[tuple[float, int]]) -> Iterator[Span]:
    """The spans in which tokens travel to or from experts and the rank computes nothing."""
    if not changes:
        return
    changes, seconds = sorted(changes), seconds_of_pairs(row)
    for place, (_, start, end) in enumerate(row):
        if place in seconds:
            continue
        is_pair = place + 1 in seconds
        end = max(end, row[place + 1].end_ms) if is_pair else end
        own = changes[bisect_left(changes, (start, -2)) : bisect_right(changes, (end, 2))]
        for since, until in exposed(1 + is_pair, start, end, own):
            yield Span(activity=Activity.ALL_TO_ALL, start_ms=since, end_ms=until)
