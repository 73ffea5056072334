"""Pictures of what really ran: the last recorded iteration of the first pipeline, written at the end of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.plan.render import render_chrome_trace, render_svg
from megatron.zerobubble.profiling.report import report

__all__ = ["write_trace"]

_log = logging.getLogger(__name__)


def write_trace(schedule: Any, directory: str) -> None:
    """Write ``timeline.svg``, ``trace.json`` (Chrome, Perfetto) and ``plan.json`` into `directory`.

    Every rank must call it; rank 0 writes. Nothing is written, and the log says why, where no iteration was recorded.

    Args:
        schedule: the `PipelineSchedule` of the run.
        directory: created if it is missing.
    """
    recorded = schedule.timeline()
    if recorded is None:
        _log.warning("no trace: only schedules of our executor are recorded, from the second iteration on")
        return
    if dist.get_rank() != 0:
        return
    plan, rows = recorded
    seen = report(plan, rows)
    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    title = f"{plan.schedule.upper()}, {plan.num_ranks} ranks, {plan.num_microbatches} microbatches: a recorded iteration"
    subtitle = (
        f"span {seen.span_ms:.0f} ms, bubble {seen.bubble_rate:.1%}; planned for these pass times {seen.planned_bubble_rate:.1%}"
    )
    (where / "timeline.svg").write_text(render_svg(rows, title=title, subtitle=subtitle), encoding="utf-8")
    (where / "trace.json").write_text(render_chrome_trace(rows), encoding="utf-8")
    (where / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    _log.info("trace: %s", where)
