"""The iterations of a run whose passes are profiled."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Window"]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which iterations are profiled. They are counted from 1, from the start of the job."""

    start: int
    """First profiled iteration."""
    end: int
    """Last profiled iteration; a new plan runs from the next one on."""
    interval: int | None = None
    """Iterations from the end of one window to the end of the next, of the same length; None: there is only one window."""

    def holds(self, iteration: int) -> bool:
        """Whether the passes of this iteration are profiled."""
        return self.start <= self._folded(iteration) <= self.end

    def ends(self, iteration: int) -> bool:
        """Whether this is the last iteration of a window, after which a new plan is made."""
        return self._folded(iteration) == self.end

    def _folded(self, iteration: int) -> int:
        if self.interval is None or iteration <= self.end:
            return iteration
        return self.end - (self.end - iteration) % self.interval
