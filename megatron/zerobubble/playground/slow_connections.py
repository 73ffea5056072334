"""Connections that send nothing do not keep others out: a request's head has a time limit, and so few may wait for one.

A connection waits from its start, or the end of a response, until the next request's head is complete. At most `MAX_WAITING` do;
one more ends that which has waited longest, so that whoever sends a request at once is always served.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.zerobubble.playground.limits import HEAD_SECONDS, MAX_WAITING

__all__ = ["PromptProtocol"]


class PromptProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection, which it never ends before the first request."""

    _waiting_since: float | None = None
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request's head."""
        super().connection_made(transport)
        self._wait()
        waiting = [each for each in self.connections if isinstance(each, PromptProtocol) and each._waiting_since is not None]
        if len(waiting) > MAX_WAITING:
            min(waiting, key=lambda each: each._waiting_since or 0.0)._give_up()

    def data_received(self, data: bytes) -> None:
        """Stop waiting once a head is complete. A part of one does not restart the clock."""
        super().data_received(data)
        if self._has_request():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request's head, unless the connection ends or a pipelined one has been read already."""
        super().on_response_complete()
        if not self.transport.is_closing() and not self._has_request():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the clock."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting_since = time.monotonic()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        self._waiting_since = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._stop_waiting()
        self.transport.close()
