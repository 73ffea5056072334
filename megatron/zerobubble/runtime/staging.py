"""CUDA tensors over gloo, through host memory: for ranks that NCCL cannot connect, for example several on one card.

gloo reads and writes host memory at once and knows no streams. A transfer is therefore two steps, and each waits for the other:

    send      current stream ──●                        ● marks the point at which the tensor is written
              leaving stream    └─ copy ─●              device -> pinned memory
              issuing thread              └─ isend      the thread waits for the copy; the rank goes on with its ops
    receive   issuing thread    irecv ─ ─ ─ ┐
              arrivals thread               └●          a thread waits for the message: there is nothing to copy before
              arriving stream                └─ copy ─● pinned memory -> device, beside the ops of the current stream
              wait()                                  └─ the host waits for the message, the current stream for the copy

No deadlock: the issuing thread waits only for what the device has been given already, and whatever that waits for has arrived,
because the device is given nothing that depends on a message before the message is there. The two directions have threads of
their own, so that no receive is posted late because a send waits for its copy. The arrivals thread waits for messages in the
order in which they were asked for, which is not the order in which they are taken. So nobody waits for that thread as such: a
message belongs to whoever comes to it first, the thread or `wait`, and `wait` stands still only for its own message.

Lifetimes: the handle holds the tensor and the pinned memory. A tensor that is sent is let go after `wait`, when gloo has sent the
copy, which is then long done; its memory can go back to the stream it came from. A buffer that is received into was allocated on
the current stream, perhaps over memory that kernels still in flight there use, so the copy waits for the point at which it was
given to `receive`; the current stream waits for the copy before anybody frees it, because every handle is waited for. So no
record_stream is needed. Pinned memory may be let go while a copy runs: torch's host allocator notes the stream of each
asynchronous copy, and waits for it before it gives the memory away again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.runtime.issuer import Issued, Issuer


class Copies(Protocol):
    """Copies between the device and host memory that the backend can use. The real thing is `CudaCopies`."""

    def mark(self) -> Any:
        """This point of the current stream."""

    def leave(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start copying `tensor`, as it is at this point of the current stream. Never blocks.

        Returns:
            Host memory, and a function that returns when the copy is in it. It may be called on another thread.
        """

    def space(self, buffer: Tensor) -> Tensor:
        """Host memory for a message of the shape of `buffer`."""

    def arrive(self, host: Tensor, buffer: Tensor, mark: Any) -> Any:
        """Start copying `host` into `buffer` after `mark`. May be called on another thread. Never blocks.

        Returns:
            The end of the copy, for `follow`.
        """

    def follow(self, copied: Any) -> None:
        """Let the current stream wait for a copy that `arrive` has started. Never blocks."""


class CudaCopies:
    """Copies on two streams of their own, one a direction: a copy that arrives must not wait for one that leaves late.

    Args:
        device: where tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)
        self._arriving = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """This point of the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def leave(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start copying `tensor` into pinned memory."""
        host = self.space(tensor)
        self._leaving.wait_event(self.mark())
        with torch.cuda.stream(self._leaving):
            host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._leaving)
        return host, copied.synchronize  # which lets go of the interpreter while it waits

    def space(self, buffer: Tensor) -> Tensor:
        """Pinned memory: only there is a copy asynchronous. torch keeps what was used before for the next time."""
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)

    def arrive(self, host: Tensor, buffer: Tensor, mark: torch.cuda.Event) -> torch.cuda.Event:
        """Start copying on the arriving stream.

        Two threads may do so at once. What one of them puts between the other's wait and copy is another wait for a point that
        the current stream comes to anyway, or another copy: the order in which copies run does not matter.
        """
        self._arriving.wait_event(mark)
        with torch.cuda.stream(self._arriving):  # of this thread only, with its device
            buffer.copy_(host, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._arriving)
        return copied

    def follow(self, copied: torch.cuda.Event) -> None:
        """Let the current stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(copied)


Call = Callable[[Tensor], dist.Work]
"""Gives a tensor in host memory to the backend."""


class Sending:
    """A send under way."""

    __slots__ = ("_host", "_issued", "_tensor")

    def __init__(self, tensor: Tensor, host: Tensor, issued: Issued) -> None:
        self._tensor, self._host, self._issued = tensor, host, issued

    def wait(self) -> None:
        """Return when the message was taken from host memory. The tensor may be freed then, on the stream it came from."""
        self._issued.wait()


class Receiving:
    """A receive under way."""

    __slots__ = ("_copied", "_copies", "_error", "_is_here", "_is_taken_care_of", "_parts")

    def __init__(self, buffer: Tensor, host: Tensor, mark: Any, copies: Copies, issued: Issued) -> None:
        self._copies = copies
        self._parts: tuple[Tensor, Tensor, Any, Issued] | None = (buffer, host, mark, issued)
        self._copied: Any = None
        self._error: Exception | None = None
        self._is_taken_care_of = threading.Lock()  # by whoever gets it; gloo's work can be waited for once
        self._is_here = threading.Event()

    def arrive(self) -> None:
        """Wait for the message and start its copy, unless somebody else does or has. On any thread."""
        if not self._is_taken_care_of.acquire(blocking=False):
            return
        assert self._parts is not None
        buffer, host, mark, issued = self._parts
        try:
            issued.wait()
            self._copied = self._copies.arrive(host, buffer, mark)
        except Exception as error:  # noqa: BLE001 - it is raised where the message is waited for
            self._error = error
        self._is_here.set()

    def wait(self) -> None:
        """Wait for the message, and make the current stream wait until it is in the buffer. To be called once."""
        self.arrive()
        self._is_here.wait()
        self._parts = None  # the arrivals thread may come to this handle much later
        if self._error is not None:
            raise self._error
        self._copies.follow(self._copied)


class _Arrivals:
    """A thread that starts the copies of messages as they arrive. It ends after `close`, or with the process."""

    def __init__(self) -> None:
        self._expected: SimpleQueue[Receiving | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="arrivals", daemon=True).start()

    def expect(self, receiving: Receiving) -> None:
        """Look after this one when all before it are here."""
        self._expected.put(receiving)

    def close(self) -> None:
        """No more will come. Does not wait: after an error there may be messages that never arrive."""
        self._expected.put(None)

    def _serve(self) -> None:
        while (receiving := self._expected.get()) is not None:
            receiving.arrive()
            del receiving  # it must not keep a tensor alive while the thread waits for the next


class Staging:
    """Both directions of one rank.

    Args:
        copies: between its device and the host.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._sends, self._receives = Issuer(), Issuer()
        self._arrivals = _Arrivals()

    def send(self, tensor: Tensor, call: Call) -> Sending:
        """Start sending. `call` is made with host memory, on another thread, in the order of the sends. Never blocks."""
        host, settle = self._copies.leave(tensor)

        def begin() -> dist.Work:
            settle()
            return call(host)

        return Sending(tensor, host, self._sends(begin))

    def receive(self, buffer: Tensor, call: Call) -> Receiving:
        """Start receiving. `call` is made with host memory, on another thread, in the order of the receives. Never blocks."""
        host, mark = self._copies.space(buffer), self._copies.mark()
        receiving = Receiving(buffer, host, mark, self._copies, self._receives(lambda: call(host)))
        self._arrivals.expect(receiving)
        return receiving

    def close(self) -> None:
        """Return when all calls have been made. To be called once."""
        self._sends.close()
        self._receives.close()
        self._arrivals.close()


def staging_for(device: torch.device) -> Staging | None:
    """What transfers of tensors on `device` need with the world's backend: nothing, unless it is gloo and the device CUDA."""
    return Staging(CudaCopies(device)) if device.type == "cuda" and dist.get_backend() == "gloo" else None
