"""Reports measured vs. planned, for the chosen iterations of the first pipeline or the last recorded one.

``trace.json`` contains all of them on one time axis, ``report.json`` one entry each; ``timeline-N.svg`` and ``plan-N.json``
belong to iteration N. docs/reading-the-trace.md explains them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.files import replace_text
from megatron.zerobubble.plan.costs.cost_model import Activations
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.render.svg import Panel, render_svg
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.profiling.report import PipelineReport, RankMemory, memory_line, report, reports_to_json

__all__ = ["picture", "report_pipeline", "write_trace"]

_log = logging.getLogger(__name__)


def report_pipeline(
    schedule: Any,
    directory: str | None,
    *,
    chosen: Collection[int] = (),
    memory: Sequence[RankMemory] | None = None,
    activations: Activations | None = None,
    by_length: LengthModel | None = None,
    show: Callable[[str], None] = _log.info,
) -> PipelineReport | None:
    """Show the pipeline's bubble, and write the trace.

    Every rank must call it, between two iterations; rank 0 writes. Both training loops report by it.

    Args:
        schedule: the `PipelineSchedule` of the run.
        directory: of --zero-bubble-trace; None: write no trace.
        chosen: iterations that --zero-bubble-trace-iterations names.
        memory: memory per rank, if it was measured.
        activations: activation memory per stage, if it was measured; the reports and plans then have it.
        by_length: costs fitted to the lengths of unequal microbatches, for ``report.json``.
        show: called with each line.

    Returns:
        The report of the last recorded iteration, on rank 0; None if none was recorded, and on other ranks.
    """
    timelines = [replace(timeline, activations=activations) for timeline in schedule.timelines()]
    if dist.get_rank() != 0:
        return None
    if not timelines:
        if directory is not None:
            _log.warning("no trace: recording starts with the second iteration, and needs at least two pipeline ranks")
        return None
    reports = [report(timeline) for timeline in timelines]
    for line in reports[-1].lines():
        show(line)
    if memory is not None:
        show(memory_line(memory))
    if directory is not None:
        missing = sorted(set(chosen) - {timeline.iteration for timeline in timelines})
        if missing:
            _log.warning("no trace of iterations %s: they did not run in this job", ", ".join(map(str, missing)))
        try:
            write_trace(timelines, reports, Path(directory), memory=memory, by_length=by_length)
        except OSError as error:  # must not make a run that is done a failed one
            _log.warning("--zero-bubble-trace %s cannot be written: %s", directory, error.strerror or error)
        else:
            show(f"trace: {directory}")
    return reports[-1]


def write_trace(
    timelines: Sequence[Timeline],
    reports: Sequence[PipelineReport],
    directory: Path,
    *,
    memory: Sequence[RankMemory] | None = None,
    by_length: LengthModel | None = None,
) -> None:
    """Write ``trace.json``, ``report.json``, and per iteration N ``timeline-N.svg`` and ``plan-N.json``, each file whole.

    Args:
        timelines: the recorded iterations.
        reports: the report of each timeline, in the same order.
        directory: created if it is missing.
        memory: memory per rank for ``report.json``, if it was measured.
        by_length: likewise, costs fitted to the lengths of unequal microbatches.
    """
    directory.mkdir(parents=True, exist_ok=True)
    replace_text(directory / "trace.json", render_trace(timelines))
    replace_text(directory / "report.json", reports_to_json(reports, memory, by_length))
    for timeline, seen in zip(timelines, reports, strict=True):
        simulation, number = seen.simulation, timeline.iteration
        plan = timeline.plan.to_json(costs=simulation.costs.to_json(), metrics=simulation.metrics())
        replace_text(directory / f"plan-{number}.json", plan)
        replace_text(directory / f"timeline-{number}.svg", picture(timeline, seen))


def picture(timeline: Timeline, seen: PipelineReport) -> str:
    """An SVG of one iteration: the plan above, the measured timeline below."""
    plan, planned = timeline.plan, seen.simulation
    before = f"planned with profiled timings: span {planned.span_ms:.0f} ms, bubble {planned.bubble_rate:.1%}"
    after = f"measured: span {seen.span_ms:.0f} ms, bubble {seen.bubble_rate:.1%}"
    size = f"{plan.num_ranks} ranks, {plan.num_microbatches} microbatches"
    return render_svg(
        [Panel.of_ops(planned.rows, caption=before), Panel(caption=after, ranks=timeline.ranks)],
        title=f"{plan.schedule.upper()}, {size}: iteration {timeline.iteration}",
        subtitle="one box per pass, its microbatch inside; gray is idle",
    )
