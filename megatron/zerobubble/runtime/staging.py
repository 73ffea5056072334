"""CUDA tensors over gloo, through host memory: for ranks that NCCL cannot connect, for example several on one GPU.

gloo reads and writes host memory and has no notion of streams. A transfer is therefore two steps, the second after the first:

    send      current stream ──●                        ● marks the point at which the tensor is written
              leaving stream    └─ copy ─●              device -> pinned memory
              issuing thread              └─ isend      the thread waits for the copy; the rank goes on with its ops
    receive   issuing thread    irecv ─ ─ ─ ┐
              arrivals thread               └●          the thread waits for the message: only then is there something to copy
              arriving stream                └─ copy ─● pinned memory -> device, in parallel to the ops of the current stream
              wait()                                  └─ the host waits for the message, the current stream for the copy

No deadlock: the issuing thread waits only for work that is queued on the device already, and all messages that this work depends
on have arrived, because nothing that depends on a message is queued before the message is here. The two directions have separate
threads, so that no receive is posted late because a send waits for its copy. The arrivals thread waits for messages in the
order in which receives were posted, which is not the order in which they are taken. So `wait` does not depend on that thread: a
message is handled by the first of the two that gets to it, and `wait` blocks only on its own message.

Lifetimes: the handle holds the tensor and the pinned memory. A tensor that is sent is released after `wait`, when gloo has sent
the copy, which has then long finished; its memory can go back to the stream it came from. A buffer that is received into was
allocated on the current stream, perhaps over memory that kernels still in flight there use, so the copy waits for the point at
which `receive` was called; the current stream waits for the copy before the buffer is freed, because every handle is waited for.
So no record_stream is needed. Pinned memory may be freed while a copy runs: torch's host allocator records the stream of each
asynchronous copy, and waits for it before it reuses the memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.runtime.issuer import Issued, Issuer
from megatron.zerobubble.runtime.threads import start_thread


class Copies(Protocol):
    """Copies between the device and host memory that the backend can use. The CUDA implementation is `CudaCopies`."""

    def mark(self) -> Any:
        """Mark this point of the current stream."""

    def leave(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start copying `tensor` to the host, as it is at this point of the current stream. Never blocks.

        Returns:
            Host memory of the same shape and dtype, and a function that returns when the copy is complete; it may be called on
            another thread.
        """

    def space(self, buffer: Tensor) -> Tensor:
        """Allocate host memory of the shape and dtype of `buffer`."""

    def arrive(self, host: Tensor, buffer: Tensor, mark: Any) -> Any:
        """Start copying `host` into `buffer` after `mark`. May be called on another thread. Never blocks.

        Returns:
            A mark at the end of the copy, for `follow`.
        """

    def follow(self, copied: Any) -> None:
        """Make the current stream wait for a copy that `arrive` has started. Never blocks."""


class CudaCopies:
    """Copies on two streams of their own, one per direction: an arriving copy must not wait for a leaving one.

    Args:
        device: CUDA device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)
        self._arriving = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
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
        return host, copied.synchronize  # which releases the GIL while it waits

    def space(self, buffer: Tensor) -> Tensor:
        """Allocate pinned memory: only there is a copy asynchronous. torch caches and reuses it."""
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)

    def arrive(self, host: Tensor, buffer: Tensor, mark: torch.cuda.Event) -> torch.cuda.Event:
        """Start copying on the arriving stream.

        Two threads may do so at once. Between one thread's wait and its copy the other one can only insert another wait for a
        point that the current stream reaches anyway, or another copy: the order in which copies run does not matter.
        """
        self._arriving.wait_event(mark)
        with torch.cuda.stream(self._arriving):  # sets the stream and the device of this thread only
            buffer.copy_(host, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._arriving)
        return copied

    def follow(self, copied: torch.cuda.Event) -> None:
        """Make the current stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(copied)


Call = Callable[[Tensor], dist.Work]
"""Starts the backend's transfer of a tensor in host memory."""


class Sending:
    """A staged send under way."""

    __slots__ = ("_host", "_issued", "_tensor")

    def __init__(self, tensor: Tensor, host: Tensor, issued: Issued) -> None:
        self._tensor, self._host, self._issued = tensor, host, issued

    def wait(self) -> None:
        """Return when the message has left host memory. The tensor may be freed then, on the stream it came from."""
        self._issued.wait()


class Receiving:
    """A staged receive under way."""

    __slots__ = ("_copied", "_copies", "_error", "_is_claimed", "_is_here", "_parts")

    def __init__(self, buffer: Tensor, host: Tensor, mark: Any, copies: Copies, issued: Issued) -> None:
        self._copies = copies
        self._parts: tuple[Tensor, Tensor, Any, Issued] | None = (buffer, host, mark, issued)
        self._copied: Any = None
        self._error: Exception | None = None
        self._is_claimed = threading.Lock()  # by the thread that acquires it; gloo's work can be waited for only once
        self._is_here = threading.Event()

    def arrive(self) -> None:
        """Wait for the message and start its copy, unless another thread does or has. May be called on any thread."""
        if not self._is_claimed.acquire(blocking=False):
            return
        assert self._parts is not None
        buffer, host, mark, issued = self._parts
        try:
            issued.wait()
            self._copied = self._copies.arrive(host, buffer, mark)
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        self._is_here.set()

    def wait(self) -> None:
        """Wait for the message, and make the current stream wait until it is in the buffer. To be called once."""
        self.arrive()
        self._is_here.wait()
        self._parts = None  # the arrivals thread may hold this handle much longer
        if self._error is not None:
            raise self._error
        self._copies.follow(self._copied)


class _Arrivals:
    """A thread that starts the copies of messages as they arrive. It ends after `close`, or when this is garbage-collected."""

    def __init__(self, device: torch.device) -> None:
        self._expected: SimpleQueue[Receiving | None] = SimpleQueue()
        start_thread(partial(_take_arrivals, self._expected), name="arrivals", device=device)
        self._end = weakref.finalize(self, self._expected.put, None)

    def expect(self, receiving: Receiving) -> None:
        """Queue a receive behind all earlier ones."""
        self._expected.put(receiving)

    def close(self) -> None:
        """End the thread after the last queued receive. Does not wait: after an error some messages may never arrive."""
        self._end()


def _take_arrivals(expected: SimpleQueue[Receiving | None]) -> None:
    while (receiving := expected.get()) is not None:
        receiving.arrive()
        del receiving  # it must not keep a tensor alive while the thread waits for the next receive


class Staging:
    """Staged sends and receives of one rank.

    Args:
        copies: copies between the rank's device and the host.
        device: the rank's device.
    """

    def __init__(self, copies: Copies, device: torch.device) -> None:
        self._copies = copies
        self._sends, self._receives = Issuer(device), Issuer(device)
        self._arrivals = _Arrivals(device)

    def send(self, tensor: Tensor, call: Call) -> Sending:
        """Start sending. Another thread passes host memory to `call`, in the order of the sends. Never blocks."""
        host, wait_for_copy = self._copies.leave(tensor)

        def begin() -> dist.Work:
            wait_for_copy()
            return call(host)

        return Sending(tensor, host, self._sends(begin))

    def receive(self, buffer: Tensor, call: Call) -> Receiving:
        """Start receiving. Another thread passes host memory to `call`, in the order of the receives. Never blocks."""
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
    """The staging that transfers of tensors on `device` need: None unless the world's backend is gloo and the device CUDA."""
    return Staging(CudaCopies(device), device) if device.type == "cuda" and dist.get_backend() == "gloo" else None
