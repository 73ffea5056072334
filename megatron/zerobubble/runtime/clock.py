"""Bringing the ranks' clocks together: what to add to a rank's clock to get that of rank 0.

Ranks of one host read the same monotonic clock, ranks of several hosts do not. Each rank asks the rank before it for the time a
few times over the pipeline's own links. The answer was given between asking and hearing it, so the middle of the two is wrong by
at most half the round trip, and the shortest of them says most. A difference that is not larger than that counts as none, so
that ranks which share a clock are not moved. Rank by rank the differences add up:

    rank r   asks at a ......... hears at b        difference = answer - (a + b) / 2
    rank r-1 .......... answers

The links are idle outside of an iteration, and first-in first-out with what an iteration sent on them: nothing is mixed up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.runtime.p2p import Links

TRIPS = 10
"""Round trips; the first ones wait for the other rank to come here at all."""


def host_clock_ms() -> float:
    """The monotonic clock, in milliseconds: what recordings are on."""
    return time.perf_counter() * 1000.0


def clock_offset_ms(
    links: Links, *, rank: int, num_ranks: int, device: torch.device, clock: Callable[[], float] = host_clock_ms
) -> float:
    """Milliseconds to add to this rank's `clock` to get rank 0's. Every rank of the pipeline must call it, between iterations.

    Args:
        links: of the pipeline; nothing may be under way on them.
        rank: pipeline rank.
        num_ranks: ranks of the pipeline.
        device: where tensors live. On CUDA a trip includes copying a number from the device.
        clock: this rank's.
    """
    offset = 0.0
    if rank > 0:
        offset = _ask(_Wire(links, rank, rank - 1, device), clock)
    if rank + 1 < num_ranks:
        _answer(_Wire(links, rank, rank + 1, device), clock, offset)
    return offset


class _Wire:
    """Single numbers to and from one other rank."""

    def __init__(self, links: Links, rank: int, peer: int, device: torch.device) -> None:
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


def _ask(wire: _Wire, clock: Callable[[], float]) -> float:
    best_ms, difference = float("inf"), 0.0
    for _ in range(TRIPS):
        asked = clock()
        wire.send(0.0)
        answer = wire.receive()
        heard = clock()
        if heard - asked < best_ms:
            best_ms, difference = heard - asked, answer - (asked + heard) / 2.0
    return difference if abs(difference) > best_ms / 2.0 else 0.0


def _answer(wire: _Wire, clock: Callable[[], float], offset: float) -> None:
    """On the clock of rank 0, so that the asker's difference is to that one."""
    for _ in range(TRIPS):
        wire.receive()
        wire.send(clock() + offset)
