"""What really ran, logger and drawn at the end of a run: the chosen iterations of the first pipeline, or the last recorded one.

``trace.json`` holds all of them at the times at which they ran, ``report.json`` an entry each; a picture and a plan belong to one
iteration and have its number in their names. docs/reading-the-trace.md reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.plan.render.svg import render_comparison
from megatron.zerobubble.plan.render.trace import render_trace
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.profiling.report import PipelineReport, RankMemory, memory_line, report, reports_to_json
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.metrics.logger import MetricsLogger

__all__ = ["picture", "report_pipeline", "write_trace"]

_log = logging.getLogger(__name__)

_STOCK = (
    "bubble: not measured under megatron-core's own schedules; for equal passes 1F1B idles "
    "(p-1)/(m+p-1) of the time, divided by about v where v stages share a rank"
)


def report_pipeline(
    schedule: Any, settings: Settings, metrics: MetricsLogger, *, memory: Sequence[RankMemory] | None = None
) -> bool:
    """Say what the pipeline's bubble was, in the log and as curves, and write the trace if it is asked for.

    Every rank must call it; rank 0 writes.

    Args:
        schedule: the `PipelineSchedule` of the run.
        settings: say whether and where to write.
        metrics: gets the curves.
        memory: what the ranks held, where it was counted.

    Returns:
        Whether there was anything to say.
    """
    timelines = schedule.timelines()
    if dist.get_rank() != 0:
        return False
    directory = settings.zero_bubble.zero_bubble_trace
    if not timelines:
        if directory is not None:
            _log.warning("no trace: only schedules of our executor are recorded, from the second iteration on")
        if schedule.spec.is_stock and schedule.spec.num_ranks > 1:
            _log.info("%s", _STOCK)
            return True
        return False
    reports = [report(timeline) for timeline in timelines]
    for line in reports[-1].lines():
        _log.info("%s", line)
    if memory is not None:
        _log.info("%s", memory_line(memory))
    for each in reports:
        metrics.add_curves(each.scalars(), each.iteration)
    if directory is not None:
        chosen = settings.zero_bubble.trace_iterations
        missing = sorted(chosen - {timeline.iteration for timeline in timelines})
        if missing:
            _log.warning("no trace of iterations %s: they did not run here", ", ".join(map(str, missing)))
        write_trace(timelines, reports, Path(directory), memory=memory)
        _log.info("trace: %s", directory)
    return True


def write_trace(
    timelines: Sequence[Timeline],
    reports: Sequence[PipelineReport],
    directory: Path,
    *,
    memory: Sequence[RankMemory] | None = None,
) -> None:
    """Write ``trace.json``, ``report.json``, and per iteration N ``timeline-N.svg`` and ``plan-N.json``.

    Args:
        timelines: what ran.
        reports: of each.
        directory: created if it is missing.
        memory: for the report, where it was counted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "trace.json").write_text(render_trace(timelines), encoding="utf-8")
    (directory / "report.json").write_text(reports_to_json(reports, memory), encoding="utf-8")
    for timeline, seen in zip(timelines, reports, strict=True):
        simulation, number = seen.simulation, timeline.iteration
        plan = timeline.plan.to_json(costs=simulation.costs.to_json(), metrics=simulation.metrics())
        (directory / f"plan-{number}.json").write_text(plan, encoding="utf-8")
        (directory / f"timeline-{number}.svg").write_text(picture(timeline, seen), encoding="utf-8")


def picture(timeline: Timeline, seen: PipelineReport) -> str:
    """The plan above, what ran below, as SVG."""
    plan, planned = timeline.plan, seen.simulation
    return render_comparison(
        planned.rows,
        timeline,
        title=(
            f"{plan.schedule.upper()}, {plan.num_ranks} ranks, {plan.num_microbatches} microbatches: "
            f"iteration {timeline.iteration}"
        ),
        subtitle="one box a pass, its microbatch inside; grey is idle",
        captions=(
            f"planned, with the measured times: span {planned.span_ms:.0f} ms, bubble {planned.bubble_rate:.1%}",
            f"measured: span {seen.span_ms:.0f} ms, bubble {seen.bubble_rate:.1%}",
        ),
    )
