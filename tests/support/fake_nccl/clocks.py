"""Vector clocks: what is ordered after what, whatever happened to come first in this run.

A timeline is anything whose own events are in order: a stream, the stream of a communicator, a thread of the host. Its clock has
an entry for every timeline: how far that one had come in everything that is ordered before this point.
"""

from __future__ import annotations

from dataclasses import dataclass

Clock = dict[int, int]
"""Number of a timeline -> the last of its events that is ordered before."""


class Timeline:
    """A sequence of events.

    Args:
        number: unique on its rank.
        name: in messages.
    """

    __slots__ = ("clock", "name", "number")

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.clock: Clock = {number: 0}

    def tick(self) -> int:
        """The next event; returns its time."""
        time = self.clock[self.number] + 1
        self.clock[self.number] = time
        return time

    def join(self, clock: Clock) -> None:
        """Everything before `clock` is ordered before the next event here."""
        mine = self.clock
        for number, time in clock.items():
            if mine.get(number, 0) < time:
                mine[number] = time


@dataclass(frozen=True, slots=True)
class Access:
    """A read or a write of memory."""

    timeline: int
    time: int
    start: int
    """First byte of the storage."""
    end: int
    text: str
    """Who reads or writes, in words."""

    def is_before(self, timeline: Timeline) -> bool:
        """Whether the next event of the timeline is ordered after this access."""
        return timeline.clock.get(self.timeline, 0) >= self.time
