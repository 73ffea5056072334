"""The `Recorder` interface: callbacks of the executor around ops and transfers, and links that report transfers to it.

Without a recorder nothing of this costs anything: the executor then uses its links as they are.

A receive is *posted* (its buffer exists), later *awaited* (the op that takes it is next) and *taken*. A send is *sent* when it is
issued and *retired* when it is proven to have arrived, which is checked only where the plan has a `retire`: the time between the
two is an upper bound of the transfer time. Between `awaited` and `taken` the rank does nothing but wait for the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.p2p import Handle, P2PLinks


class Recorder(Protocol):
    """Callbacks of the executor, one per event of an op or a transfer. Inherit and override the ones you need.

    All calls but `computes` come from the thread that runs the executor, with the stream current that the ops run on. On the CPU
    an event happens at the host time of its call. On CUDA the host runs ahead and every wait is a wait of the stream: the time of
    an event is that of a CUDA event recorded in the call.
    """

    def start(self, op: Op) -> None:
        """The op's input is here and it is about to run."""
        return

    def end(self, op: Op) -> None:
        """The op's work has been issued (CUDA) or done (CPU)."""
        return

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        """The op's result has been handed to its consumer, and the executor holds no other reference to it.

        Args:
            op: the op that ran.
            in_transit: returns the bytes in flight on this rank now: buffers of posted receives, tensors of sends that are not
                retired, and tensors handed to another stage of the rank. Valid until `settled` returns.
        """
        return

    def computes(self, change: int) -> None:
        """Inside of ops one more pass (1) or one less (-1) computes from here on, or a wgrad GEMM beside it.

        A pass computes from the start of its op to its end, but not while its tokens travel to or from experts, and in a pair not
        when it has ended before the other one. This may be called from the thread of either pass.
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
        """A send is over, and its tensor released."""
        return

    def rewind(self) -> None:
        """The ops so far are discarded and run again, from the first one (rollback of an optimistic optimizer step)."""
        return


_PASSES = {OpKind.F: "forward", OpKind.B: "dgrad", OpKind.W: "wgrad", OpKind.BW: "full backward"}


def op_text(op: Op) -> str:
    """An op in words, for messages."""
    return f"{op}, the {_PASSES[op.kind]} of {op.where}"


def fan_out(recorders: Sequence[Recorder]) -> Recorder | None:
    """Combine recorders into one that passes every call on to all of them, in their order.

    Args:
        recorders: the recorders that take part in one iteration.

    Returns:
        None without recorders, the recorder itself if there is one, otherwise a recorder that calls all of them.
    """
    return _FanOut(recorders) if len(recorders) > 1 else next(iter(recorders), None)


_CALLS = tuple(name for name in vars(Recorder) if not name.startswith("_"))
"""Names of the methods of `Recorder`."""


class _FanOut(Recorder):
    """Several recorders as one.

    Each method is an attribute of the instance, bound once to the recorders that override it: an op costs one call per recorder
    that uses it, and no attribute lookup.
    """

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        for name in _CALLS:
            default = getattr(Recorder, name)
            bound = [getattr(recorder, name) for recorder in recorders]
            setattr(self, name, _call_each([call for call in bound if getattr(call, "__func__", None) is not default]))


def _call_each(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    if len(calls) == 1:
        return calls[0]

    def call_each(*args: object) -> None:
        for call in calls:
            call(*args)

    return call_each


class RecordedLinks:
    """Links that report every transfer to a recorder, and count the bytes in flight.

    Args:
        links: the links that transfer the tensors.
        recorder: receives the events of the transfers.
    """

    def __init__(self, links: P2PLinks, recorder: Recorder) -> None:
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
