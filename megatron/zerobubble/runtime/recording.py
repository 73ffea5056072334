"""What a recorder is told while an executor walks, and the links that tell it about transfers.

Without a recorder nothing of this is in the way: the executor then uses its links as they are.

A receive is *posted* (its buffer exists), later *awaited* (the op that takes it is next) and *taken*. A send is *sent* when it is
issued and *retired* when it is proven to have arrived, which is checked only when the plan says so: the time between the two is
at most, not exactly, the time it travelled. Between `awaited` and `taken` the rank does nothing but wait for the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.runtime.p2p import Handle, Links


class Recorder(Protocol):
    """Told when what happens. Inherit to hear of some of it only: what is not overridden does nothing.

    All calls come from the thread that runs the executor, with the stream current that the ops run on. On the CPU a call's host
    time is the time of what it tells. On CUDA the host runs ahead and every wait is a wait of the stream: the time of a call is
    that of an event recorded in it.
    """

    def start(self, op: Op) -> None:
        """The op's input is here and it is about to run."""
        return

    def end(self, op: Op) -> None:
        """The op's work has been issued (CUDA) or done (CPU)."""
        return

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        """The op's result has been handed on, and nothing of it is held but by who takes it.

        Args:
            op: what ran.
            in_transit: the bytes in flight on this rank now: buffers of posted receives, tensors of sends that are not retired,
                and tensors waiting for another stage of the rank. To be called before `settled` returns.
        """
        return

    def posted(self, message: Message) -> None:
        """A receive has been posted."""
        return

    def awaited(self, message: Message) -> None:
        """The next op takes this message; the rank is about to wait for it."""
        return

    def taken(self, message: Message) -> None:
        """The message is here; on CUDA, for what is issued from here on."""
        return

    def sent(self, message: Message) -> None:
        """A send is about to be issued: it cannot have arrived before. On CUDA it starts when the stream has come here."""
        return

    def retiring(self, message: Message) -> None:
        """A send is about to be waited for; it should be over by now."""
        return

    def retired(self, message: Message) -> None:
        """A send is over, and its tensor let go."""
        return

    def rewind(self) -> None:
        """Everything so far was given up: the same ops begin again, from the first."""
        return


def together(recorders: Sequence[Recorder]) -> Recorder | None:
    """One recorder that tells all of them, in their order; None where there is none."""
    return _Several(recorders) if len(recorders) > 1 else next(iter(recorders), None)


class _Several(Recorder):
    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def start(self, op: Op) -> None:
        for recorder in self._recorders:
            recorder.start(op)

    def end(self, op: Op) -> None:
        for recorder in self._recorders:
            recorder.end(op)

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        for recorder in self._recorders:
            recorder.settled(op, in_transit)

    def posted(self, message: Message) -> None:
        for recorder in self._recorders:
            recorder.posted(message)

    def awaited(self, message: Message) -> None:
        for recorder in self._recorders:
            recorder.awaited(message)

    def taken(self, message: Message) -> None:
        for recorder in self._recorders:
            recorder.taken(message)

    def sent(self, message: Message) -> None:
        for recorder in self._recorders:
            recorder.sent(message)

    def retiring(self, message: Message) -> None:
        for recorder in self._recorders:
            recorder.retiring(message)

    def retired(self, message: Message) -> None:
        for recorder in self._recorders:
            recorder.retired(message)

    def rewind(self) -> None:
        for recorder in self._recorders:
            recorder.rewind()


class RecordedLinks:
    """Links that tell a recorder, and count the bytes in flight.

    Args:
        links: what really transfers.
        recorder: what is told.
    """

    def __init__(self, links: Links, recorder: Recorder) -> None:
        self._links = links
        self._recorder = recorder
        self._bytes: dict[Message, int] = {}

    @property
    def in_transit_bytes(self) -> int:
        """Bytes of receives posted and not taken, and of sends not retired."""
        return sum(self._bytes.values())

    def send(self, message: Message, tensor: Tensor) -> Handle:
        """Start sending `tensor`."""
        self._recorder.sent(message)
        handle = self._links.send(message, tensor)
        self._bytes[message] = tensor.nbytes
        return _RecordedSend(message, handle, self._bytes, self._recorder)

    def receive(self, message: Message, buffer: Tensor) -> Handle:
        """Start receiving into `buffer`."""
        handle = self._links.receive(message, buffer)
        self._bytes[message] = buffer.nbytes
        self._recorder.posted(message)
        return _RecordedReceive(message, handle, self._bytes, self._recorder)


class _RecordedTransfer:
    __slots__ = ("_bytes", "_handle", "_message", "_recorder")

    def __init__(self, message: Message, handle: Handle, in_flight: dict[Message, int], recorder: Recorder) -> None:
        self._message, self._handle, self._bytes, self._recorder = message, handle, in_flight, recorder


class _RecordedSend(_RecordedTransfer):
    def wait(self) -> None:
        self._recorder.retiring(self._message)
        self._handle.wait()
        del self._bytes[self._message]
        self._recorder.retired(self._message)


class _RecordedReceive(_RecordedTransfer):
    def wait(self) -> None:
        self._recorder.awaited(self._message)
        self._handle.wait()
        del self._bytes[self._message]
        self._recorder.taken(self._message)
