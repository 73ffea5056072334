"""Timelines in the JSON form that the page draws: numbers per rank, metrics and text.

``ranks[r]`` holds parallel lists with one entry per op: ``kinds`` (index into `KINDS`), ``chunks``, ``stages``, ``microbatches``,
``starts`` and ``ends`` in milliseconds from the first op of all ranks; and the staircase of activation memory: ``held`` after the
times ``steps``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import OpKind, Placement, Plan
from megatron.zerobubble.plan.memory_profile import activation_memory_over_time
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.render.svg import SPAN_COLORS
from megatron.zerobubble.plan.render.text import chunks_of, extent, render_text
from megatron.zerobubble.plan.simulate import TimedOp
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.plan.validate import live_microbatches, pending_wgrads
from megatron.zerobubble.playground.words import headline, measures, milliseconds, percent, title
from megatron.zerobubble.profiling.breakdown import rank_times
from megatron.zerobubble.profiling.report import report

Drawing = dict[str, Any]

KINDS = tuple(OpKind)
"""Op kinds in the order of the indices in ``kinds``."""
_TEXT_OPS = 2000
"""Maximum width of the text timeline, in characters; wider ones are drawn without microbatch numbers."""
_DIGITS = 5


def draw_plan(result: Result) -> Drawing:
    """The drawing of a simulated plan."""
    simulation, plan = result.simulation, result.simulation.plan
    drawing = _draw(plan, simulation.rows, simulation.costs)
    return drawing | {
        "source": "plan",
        "headline": headline(plan),
        "measures": measures(simulation),
        "metrics": result.metrics() | _sent(plan.placement, plan.num_microbatches),
        "plan": plan.to_json(costs=simulation.costs.to_json(), metrics=result.metrics()),
    }


def draw_recorded(timeline: Timeline) -> Drawing:
    """The drawing of a recorded iteration. Its activation memory follows from the passes and the measured sizes."""
    seen = report(timeline)
    plan, costs = timeline.plan, seen.simulation.costs
    drawing = _draw(plan, timeline.rows, costs)
    begin = timeline.begin_ms
    spans = [
        [
            [span.activity.value, round(span.start_ms - begin, _DIGITS), round(span.end_ms - begin, _DIGITS)]
            for span in rank.spans
            if span.activity in SPAN_COLORS
        ]
        for rank in timeline.ranks
    ]
    metrics = {
        "span_ms": seen.span_ms,
        "makespan_ms": seen.makespan_ms,
        "bubble_rate": seen.bubble_rate,
        "peak_memory": list(seen.simulation.peak_memory),
    }
    return drawing | {
        "source": "trace",
        "headline": f"iteration {timeline.iteration} as it ran: {headline(plan)}",
        "measures": (
            f"bubble rate {percent(seen.bubble_rate)}, makespan {milliseconds(seen.makespan_ms)}, "
            f"span {milliseconds(seen.span_ms)}"
        ),
        "memory_is_assumed": timeline.activations is None,
        "metrics": metrics | _sent(plan.placement, plan.num_microbatches),
        "lines": [line.strip() for line in seen.lines()],
        "spans": spans,
        "iteration": timeline.iteration,
        "plan": plan.to_json(costs=costs.to_json(), metrics=seen.simulation.metrics()),
    }


def _draw(plan: Plan, rows: Sequence[Sequence[TimedOp]], costs: CostModel) -> Drawing:
    begin, end = extent(rows)
    stairs = activation_memory_over_time(rows, plan.num_microbatches, costs.reordered(plan.assignment))
    times = rank_times(rows)
    peaks = [max((held for _, held in stair), default=0.0) for stair in stairs]
    counts = zip(live_microbatches(plan), pending_wgrads(plan), times, peaks, strict=True)
    return {
        "schedule": plan.schedule,
        "title": title(plan.schedule),
        "problem": _problem(plan, costs),
        "num_ranks": plan.num_ranks,
        "num_microbatches": plan.num_microbatches,
        "num_chunks": plan.placement.num_chunks,
        "placement": plan.placement.name,
        "length_ms": end - begin,
        "ranks": [_rank(row, stair, begin) for row, stair in zip(rows, stairs, strict=True)],
        "table": [
            {
                "peak_memory": peak,
                "live": live,
                "pending": pending,
                "busy_ms": time.busy_ms,
                "idle_ms": time.phases.idle_ms,
                "starts_after_ms": time.starts_after_ms,
                "ends_before_ms": time.ends_before_ms,
            }
            for live, pending, time, peak in counts
        ],
        "costs": costs.to_json(),
        "text": render_text(rows, max_width=_TEXT_OPS),
    }


def _problem(plan: Plan, costs: CostModel) -> dict[str, float]:
    """What two plans must have in common to be compared: sizes, links, and the costs of the whole model, however it is cut."""
    sums = {name: math.fsum(values) for name, values in costs.to_json().items() if isinstance(values, list)}
    return {"num_ranks": plan.num_ranks, "num_microbatches": plan.num_microbatches, "comm_ms": costs.comm_ms} | sums


def _rank(row: Sequence[TimedOp], stair: Sequence[tuple[float, float]], begin: float) -> dict[str, Any]:
    chunks = chunks_of(row)
    return {
        "kinds": [KINDS.index(timed.op.kind) for timed in row],
        "chunks": [chunks[timed.op.stage] for timed in row],
        "stages": [timed.op.stage for timed in row],
        "microbatches": [timed.op.microbatch for timed in row],
        "starts": [round(timed.start_ms - begin, _DIGITS) for timed in row],
        "ends": [round(timed.end_ms - begin, _DIGITS) for timed in row],
        "steps": [round(moment - begin, _DIGITS) for moment, _ in stair],
        "held": [round(held, _DIGITS) for _, held in stair],
    }


def _sent(placement: Placement, num_microbatches: int) -> dict[str, Any]:
    """P2P messages per iteration: activations and gradients over every stage boundary between ranks; also relative to 1F1B."""
    ranks = placement.stage_to_rank
    borders = sum(here != there for here, there in pairwise(ranks))
    least = placement.num_ranks - 1
    return {
        "num_messages": 2 * borders * num_microbatches,
        "relative_messages": borders / least if least else 0.0,
    }


def to_text(drawing: Drawing) -> str:
    """Encode a drawing as compact JSON."""
    return json.dumps(drawing, separators=(",", ":"))
