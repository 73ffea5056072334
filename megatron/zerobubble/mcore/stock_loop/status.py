"""What runs in a stock loop and what it is predicted to gain over 1F1B: as data, and as one line of text."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective, TimesAndBubble
from megatron.zerobubble.plan.registry import stock_plan
from megatron.zerobubble.plan.simulate import simulate

__all__ = ["Status", "show_line"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The schedule of the model that was started or re-planned last. Predictions are for measured times, or else for F = B = W.

    1F1B is megatron-core's, with one stage per rank and the same costs.
    """

    schedule: str
    """The name by which it was installed, such as `zb-h1`."""
    num_ranks: int
    """Pipeline ranks, p."""
    num_microbatches: int
    """Per iteration, m."""
    bubble_rate: float
    """Predicted share of the iteration time, with the optimizer that runs, in which the slowest rank is idle, 0..1."""
    bubble_rate_1f1b: float
    """1F1B's."""
    relative_time: float
    """Predicted iteration time with the optimizer that runs (synchronous, or with post-validation), relative to 1F1B's."""
    relative_memory: float
    """Predicted peak of activation memory over all ranks, relative to 1F1B's."""
    forward_ms: tuple[float, ...] | None = None
    """Measured time of F per stage and microbatch; None before re-planning."""
    backward_ms: tuple[float, ...] | None = None
    """Measured time of B."""
    wgrad_ms: tuple[float, ...] | None = None
    """Measured time of W."""
    measured_bubble_rate: float | None = None
    """Of this rank's pipeline in the last iteration that was recorded before re-planning; None: none was recorded."""
    iteration_ms: float | None = None
    """Measured time of the passes of that iteration, with the optimizer that runs."""
    predicted_ms: float | None = None
    """Predicted for measured times of the passes: what `iteration_ms` becomes; None before re-planning."""

    @staticmethod
    def of(
        plan: Plan,
        costs: CostModel,
        *,
        schedule: str,
        objective: Objective,
        is_measured: bool = False,
        recorded: TimesAndBubble | None = None,
    ) -> Status:
        """Simulate a plan and 1F1B.

        Args:
            plan: what runs.
            costs: of its stages.
            schedule: the name by which it was installed; a plan that was searched for has that of its family.
            objective: the iteration time with the optimizer that runs.
            is_measured: whether the costs are.
            recorded: the last iteration that was recorded before re-planning.
        """
        own = simulate(plan, costs)
        stock = stock_plan(plan.num_microbatches, num_ranks=plan.num_ranks, num_chunks=1)
        other = simulate(stock, costs.whole.merged(plan.num_ranks))
        times: dict[str, Any] = {}
        if is_measured:
            times = {name: getattr(costs, name) for name in ("forward_ms", "backward_ms", "wgrad_ms")}
        return Status(
            schedule=schedule,
            num_ranks=plan.num_ranks,
            num_microbatches=plan.num_microbatches,
            bubble_rate=objective.bubble_of(own),
            bubble_rate_1f1b=objective.bubble_of(other),
            relative_time=_ratio(objective.of(own), objective.of(other)),
            relative_memory=_ratio(max(own.peak_memory), max(other.peak_memory)),
            measured_bubble_rate=None if recorded is None else objective.bubble_of(recorded),
            iteration_ms=None if recorded is None else objective.of_passes(recorded),
            predicted_ms=objective.of_passes(own) if is_measured else None,
            **times,
        )

    def line(self, times_text: str) -> str:
        """For the terminal, with the times that the predictions are for."""
        off = "; ZERO_BUBBLE=0 in the environment or megatron.zerobubble.uninstall() turns it off"
        replanned, off = ("", off) if self.forward_ms is None else (" re-planned", "")
        measured = "" if self.measured_bubble_rate is None else f", measured before: {self.measured_bubble_rate:.1%}"
        return (
            f"{self.schedule}{replanned}, p = {self.num_ranks}, m = {self.num_microbatches}: predicted bubble "
            f"{self.bubble_rate:.1%} (1F1B: {self.bubble_rate_1f1b:.1%}{measured}) for {times_text}, {self.relative_time:.2f} of "
            f"1F1B's iteration time and {self.relative_memory:.2f} of its activation memory{off}"
        )


def _ratio(own: float, other: float) -> float:
    return own / other if other > 0 else math.nan


def show_line(text: str) -> None:
    """Write a line to stderr: a loop may not show what is logged."""
    sys.stderr.write(f"zero bubble: {text}\n")
