"""Which iteration time a plan is made for."""

from __future__ import annotations

import enum
from typing import Protocol


class PassTimes(Protocol):
    """Anything with both times of a plan's passes: a `Simulation`, a `Bound`, a recorded iteration."""

    @property
    def span_ms(self) -> float:
        """Milliseconds per iteration with optimizer post-validation."""

    @property
    def makespan_ms(self) -> float:
        """Milliseconds per iteration with the synchronous optimizer."""


class IterationTimes(PassTimes, Protocol):
    """Times of passes, and with what surrounds them."""

    @property
    def step(self) -> PassTimes | None:
        """Both times with what surrounds the passes (`StepCosts`); None: nothing does."""


class TimesAndBubble(PassTimes, Protocol):
    """A `Simulation` or a `Bound`, with its bubble as well."""

    @property
    def bubble_rate(self) -> float:
        """Idle share of the span on the bottleneck rank, 0..1."""


class Objective(enum.Enum):
    """Which iteration time a search minimizes; `of` reads it from a simulation or a bound."""

    SPAN = "span"
    """Iteration time with post-validation: the optimizer steps without waiting for other ranks."""
    MAKESPAN = "makespan"
    """Iteration time with the synchronous optimizer, which waits for all ranks."""

    @classmethod
    def with_optimizer(cls, *, post_validation: bool) -> Objective:
        """The iteration time of a run with optimizer post-validation, or with the synchronous optimizer."""
        return cls.SPAN if post_validation else cls.MAKESPAN

    @property
    def label(self) -> str:
        """The name of this iteration time in reports, for example `with post-validation (span)`."""
        return f"with {'post-validation' if self is Objective.SPAN else 'the synchronous optimizer'} ({self.value})"

    def of(self, times: IterationTimes) -> float:
        """The iteration time that this objective minimizes, in milliseconds, with what surrounds the passes where it is known."""
        return self.of_passes(times if times.step is None else times.step)

    def of_passes(self, times: PassTimes) -> float:
        """The iteration time of the passes alone, in milliseconds."""
        return times.span_ms if self is Objective.SPAN else times.makespan_ms

    def bubble_of(self, times: TimesAndBubble) -> float:
        """Idle share of this iteration time on the bottleneck rank, 0..1, of the passes alone."""
        busy, whole = times.span_ms * (1 - times.bubble_rate), self.of_passes(times)
        return max(0.0, 1 - busy / whole) if whole > 0 else 0.0


DEFAULT_OBJECTIVE = Objective.MAKESPAN
"""Of all searches: what a run minimizes unless it has post-validation."""
