"""What a recorded iteration says: its bubble, and the costs to plan with.

The measured bubble uses the paper's definition (arXiv 2401.10241, section 5.3) with measured numbers in it: span is the longest
time any rank needs from the start of its first op to the end of its last, work is the time the busiest rank computes, and the
bubble rate is (span - work) / span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import OpKind, Plan
from megatron.zerobubble.plan.simulate import TimedOp, simulate

Rows = Sequence[Sequence[TimedOp]]
"""Per pipeline rank its ops in the order they ran, in milliseconds."""


@dataclass(frozen=True)
class PipelineReport:
    """One recorded iteration against its plan."""

    span_ms: float
    work_ms: float
    bubble_rate: float
    planned_bubble_rate: float
    """What the plan reaches in the simulator with the measured times, free links and no other load."""

    def sentence(self) -> str:
        """For the end of a run."""
        return (
            f"bubble: {self.bubble_rate:.1%} of the last recorded iteration ({self.work_ms:.0f} of {self.span_ms:.0f} ms were "
            f"passes on the busiest rank); the plan promises {self.planned_bubble_rate:.1%} for these pass times"
        )


def report(plan: Plan, rows: Rows) -> PipelineReport:
    """Compare a recorded iteration with its plan.

    Args:
        plan: what ran.
        rows: what was recorded, one row a rank.
    """
    span = max(row[-1].end_ms - row[0].start_ms for row in rows)
    work = max(sum(op.end_ms - op.start_ms for op in row) for row in rows)
    planned = simulate(plan, measured_costs(plan, rows))
    return PipelineReport(span, work, max(0.0, span - work) / span, planned.bubble_rate)


def measured_costs(plan: Plan, rows: Rows) -> CostModel:
    """The median time of each stage's F, B and W. Links count as free and activations as equal."""
    times: dict[tuple[int, OpKind], list[float]] = {}
    for row in rows:
        for timed in row:
            times.setdefault((timed.op.stage, timed.op.kind), []).append(timed.end_ms - timed.start_ms)

    def typical(*kinds: OpKind) -> tuple[float, ...]:
        return tuple(
            sum(median(times[stage, kind]) for kind in kinds if (stage, kind) in times) for stage in range(plan.num_stages)
        )

    share = 1.0 / plan.placement.num_chunks
    return CostModel(
        forward_ms=typical(OpKind.F),
        backward_ms=typical(OpKind.B, OpKind.BW),
        wgrad_ms=typical(OpKind.W),
        activation=(share,) * plan.num_stages,
        activation_after_backward=(share,) * plan.num_stages,
    )
