"""Align the clocks of the ranks: the offset from each rank's clock to that of rank 0.

Ranks of one host read the same monotonic clock, ranks of several hosts do not. Each rank requests the time from the rank before
it a few times over the pipeline's own links. The reply was sent between the request at a and its arrival at b, so the middle of
the two is wrong by at most half the round trip, and the shortest round trip is the most accurate. An offset below that error
counts as 0, so that ranks which share a clock stay aligned. The offsets add up from rank to rank:

    rank r   requests at a ......... receives at b      offset = reply - (a + b) / 2
    rank r-1 .............. replies

The links are idle outside of an iteration and deliver in order, so these messages cannot mix with those of an iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.runtime.p2p import P2PLinks

TRIPS = 10
"""Round trips; the first ones include waiting for the other rank to get here."""


def host_clock_ms() -> float:
    """The host's monotonic clock in milliseconds, the time base of recordings."""
    return time.perf_counter() * 1000.0


def clock_offset_ms(
    links: P2PLinks, *, rank: int, num_ranks: int, device: torch.device, clock: Callable[[], float] = host_clock_ms
) -> float:
    """Measure the offset of this rank's clock. Every rank of the pipeline must call it, between iterations.

    Args:
        links: links of the pipeline, without transfers under way.
        rank: pipeline rank.
        num_ranks: number of pipeline ranks.
        device: device of the tensors. On CUDA a round trip includes copying a number from the device.
        clock: this rank's clock, in milliseconds.

    Returns:
        Milliseconds to add to this rank's `clock` to get rank 0's.
    """
    offset = 0.0
    if rank > 0:
        offset = _request(_Wire(links, rank, rank - 1, device), clock)
    if rank + 1 < num_ranks:
        _reply(_Wire(links, rank, rank + 1, device), clock, offset)
    return offset


class _Wire:
    """Sends single numbers to one other rank and receives them."""

    def __init__(self, links: P2PLinks, rank: int, peer: int, device: torch.device) -> None:
        # The payload and stage of a message only name it, in errors.
        self._there = Message(Payload.ACTIVATION, peer, 0, rank, peer)
        self._back = Message(Payload.ACTIVATION, rank, 0, peer, rank)
        self._links = links
        self._device = device

    def send(self, value: float) -> None:
        self._links.send(self._there, torch.tensor([value], dtype=torch.float64, device=self._device)).wait()

    def receive(self) -> float:
        buffer = torch.empty(1, dtype=torch.float64, device=self._device)
        self._links.receive(self._back, buffer).wait()
        return float(buffer.item())  # on CUDA this is where the host waits


def _request(wire: _Wire, clock: Callable[[], float]) -> float:
    best_ms, offset = float("inf"), 0.0
    for _ in range(TRIPS):
        requested = clock()
        wire.send(0.0)
        reply = wire.receive()
        received = clock()
        if received - requested < best_ms:
            best_ms, offset = received - requested, reply - (requested + received) / 2.0
    return offset if abs(offset) > best_ms / 2.0 else 0.0


def _reply(wire: _Wire, clock: Callable[[], float], offset: float) -> None:
    """Reply with times on rank 0's clock, so that the requesting rank measures its offset to rank 0."""
    for _ in range(TRIPS):
        wire.receive()
        wire.send(clock() + offset)
