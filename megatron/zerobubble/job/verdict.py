"""Which rank holds up a job in which nothing goes on: from what all ranks said last.

A rank that says nothing is stopped, and so are those that wait for it. Else it is the one that does something without waiting for
another rank. If all wait, two of them wait for each other, and what is lost is between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.zerobubble.job.heartbeats import Beat

__all__ = ["HangVerdict", "decide"]


class HangVerdict(NamedTuple):
    """The rank that holds up the job."""

    rank: int
    reason: str
    """One line that names it, what it was doing and for how long."""
    num_silent: int = 0
    """How many ranks say nothing; if any, the named one is among them, and another rank has to end it."""


def decide(
    beats: Mapping[int, Beat], *, silent_s: Mapping[int, float], world_size: int, least_still_s: float, waited_s: float
) -> HangVerdict:
    """Name the rank that holds up the job.

    Args:
        beats: the last beat of each rank that ever published one.
        silent_s: ranks of which nothing new is heard, with the number of seconds.
        world_size: ranks of the job.
        least_still_s: a rank that has done the same for less time than this, in seconds, is not stuck.
        waited_s: how long the ranks that never published a beat were waited for, in seconds.
    """
    missing = [rank for rank in range(world_size) if rank not in beats]
    if silent_s:
        rank = max(sorted(silent_s), key=lambda each: silent_s[each])
        also = sorted((set(silent_s) | set(missing)) - {rank})
        return HangVerdict(rank, f"{_silence(rank, silent_s[rank], beats[rank])}{_also(also)}", 1 + len(also))
    if missing:
        reason = f"rank {missing[0]} has not joined the job: it has said nothing for {waited_s:.1f} s{_also(missing[1:])}"
        return HangVerdict(missing[0], reason, len(missing))
    working = [rank for rank, beat in beats.items() if not beat.is_waiting and beat.still_s >= least_still_s]
    if working:
        rank = max(sorted(working), key=lambda each: (not beats[each].is_shared, beats[each].still_s))
        return HangVerdict(rank, f"rank {rank} makes no progress: it {_position(beats[rank])}")
    return _lost_between(beats)


def _lost_between(beats: Mapping[int, Beat]) -> HangVerdict:
    """All ranks wait."""
    cut = _cut(beats)
    if cut is not None:
        rank, peer = cut
        reason = (
            f"ranks {rank} and {peer} have lost their connection: data that was sent is not acknowledged; rank {rank} "
            f"{_position(beats[rank])}; rank {peer} {_position(beats[peer])}"
        )
        return HangVerdict(rank, reason)
    for rank, beat in sorted(beats.items()):
        other = beat.waits_for
        if other is not None and other in beats and beats[other].waits_for == rank:
            reason = (
                f"ranks {rank} and {other} wait for each other, so a message between them is lost: rank {rank} "
                f"{_position(beat)}; rank {other} {_position(beats[other])}"
            )
            return HangVerdict(rank, reason)
    rank = max(sorted(beats), key=lambda each: beats[each].still_s)
    reason = f"every rank waits for others, first rank {rank}: it {_position(beats[rank])}"
    return HangVerdict(rank, reason)


def _cut(beats: Mapping[int, Beat]) -> tuple[int, int] | None:
    """Two ranks between which data is not acknowledged."""
    owner = {address: rank for rank, beat in beats.items() for address in beat.connections.local}
    for rank, beat in sorted(beats.items()):
        for address in beat.connections.unanswered:
            if owner.get(address, rank) != rank:
                return rank, owner[address]
    return None


def _silence(rank: int, seconds: float, beat: Beat) -> str:
    where = f"process {beat.process.pid} on {beat.process.host.split()[0]}"
    doing = "" if beat.doing is None else f"; when last heard of, it {beat.doing}{beat.place}"
    return f"rank {rank} ({where}) has said nothing for {seconds:.1f} s: it is stopped, or its machine is gone{doing}"


def _position(beat: Beat) -> str:
    return f"{beat.doing or 'is outside of the passes'}, for {beat.still_s:.1f} s{beat.place}"


def _also(ranks: list[int]) -> str:
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"; the same is true of rank{'s' if len(ranks) > 1 else ''} {shown}"
