"""Timelines in the JSON form that the page draws: numbers per rank, metrics and text.

``ranks[r]`` holds parallel lists with one entry per op: ``kinds`` (index into `KINDS`), ``chunks``, ``stages``, ``microbatches``,
``slices``, ``starts`` and ``ends`` in milliseconds from the first op of all ranks; and the staircase of activation memory:
``held`` after the times ``steps``. ``seconds`` are the places of the second ops of pairs. ``microbatches`` are slots of the plan;
``slots`` has, of unequal microbatches, which one of the data each runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron.zerobubble.plan.communication import num_messages
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostTable
from megatron.zerobubble.plan.ir import OpKind, Plan
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.render.plan_summary import (
    all_to_alls,
    headline,
    iteration_times,
    lengths,
    measures,
    slots,
    step_times,
    title,
)
from megatron.zerobubble.plan.render.svg import SPAN_COLORS
from megatron.zerobubble.plan.render.text import chunks_of, extent, render_text
from megatron.zerobubble.plan.simulate import TimedOp, memory_over_time, seconds_of_pairs
from megatron.zerobubble.plan.timeline import Timeline
from megatron.zerobubble.plan.validate import live_microbatches, pending_wgrads
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
    idle = {} if simulation.costs.is_plain else {"idle_share": simulation.idle_share}
    return drawing | {
        "source": "plan",
        "headline": headline(plan, title(plan.schedule)),
        "measures": measures(simulation),
        "lengths": lengths(simulation) + step_times(simulation) + all_to_alls(simulation),
        "metrics": result.metrics() | _sent(plan) | idle,
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
        "headline": f"iteration {timeline.iteration} as it ran: {headline(plan, title(plan.schedule))}",
        "measures": iteration_times(seen),
        "memory_is_assumed": timeline.activations is None,
        "metrics": metrics | _sent(plan),
        "lines": [line.strip() for line in seen.lines()],
        "spans": spans,
        "text": text_of(timeline.rows),
        "iteration": timeline.iteration,
        "plan": plan.to_json(costs=costs.to_json(), metrics=seen.simulation.metrics()),
    }


def _draw(plan: Plan, rows: Sequence[Sequence[TimedOp]], costs: CostModel) -> Drawing:
    begin, end = extent(rows)
    stairs = memory_over_time(rows, plan.num_microbatches, costs.reordered(plan.assignment))
    times = rank_times(rows)
    peaks = [max((held for _, held in stair), default=0.0) for stair in stairs]
    counts = zip(live_microbatches(plan), pending_wgrads(plan), times, peaks, strict=True)
    return {
        "schedule": plan.schedule,
        "title": title(plan.schedule),
        "problem": _problem(plan, costs),
        "num_ranks": plan.num_ranks,
        "num_microbatches": plan.num_microbatches,
        "num_slices": plan.num_slices,
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
                "idle_ms": time.idle_ms,
                "starts_after_ms": time.starts_after_ms,
                "ends_before_ms": time.ends_before_ms,
            }
            for live, pending, time, peak in counts
        ],
        "slots": _slots(plan, costs),
        "costs": costs.to_json(),
    }


def text_of(rows: Sequence[Sequence[TimedOp]]) -> str:
    """A timeline in letters."""
    return render_text(rows, max_width=_TEXT_OPS)


def _problem(plan: Plan, costs: CostModel) -> dict[str, Any]:
    """What two plans must have in common to be compared: sizes, links, and the costs of whole microbatches on the whole model,
    however those are cut.

    Of unequal microbatches every one's costs are in it, of unequal links the time of a mean message between neighbors.
    """
    costs = costs.whole
    every, links = costs.table, costs.links
    unequal = {
        "microbatches": [] if every.is_alike else _per_microbatch(every),
        "links": [] if links is None else list(links.neighbors),
    }
    lists = {"all_to_all": list(costs.all_to_all)} | costs.to_json()
    sums = {name: math.fsum(values) for name, values in lists.items() if isinstance(values, list)}
    return {"num_ranks": plan.num_ranks, "num_microbatches": plan.num_microbatches, "comm_ms": costs.comm_ms} | sums | unequal


def _per_microbatch(every: CostTable) -> list[float]:
    rows = (row for name in COST_LISTS for row in getattr(every, name))
    return list(map(math.fsum, zip(*rows, strict=True)))


def _slots(plan: Plan, costs: CostModel) -> dict[str, list[int]] | None:
    """Per slot of a plan the index of its microbatch in the data, and its tokens if they are known; None if all are equal."""
    found = slots(plan, costs)
    tokens = [slot["tokens"] for slot in found if "tokens" in slot]
    return {"indices": [slot["data_microbatch"] for slot in found], "tokens": tokens} if found else None


def _rank(row: Sequence[TimedOp], stair: Sequence[tuple[float, float]], begin: float) -> dict[str, Any]:
    chunks = chunks_of(row)
    return {
        "kinds": [KINDS.index(timed.op.kind) for timed in row],
        "chunks": [chunks[timed.op.stage] for timed in row],
        "stages": [timed.op.stage for timed in row],
        "microbatches": [timed.op.microbatch for timed in row],
        "slices": [timed.op.slice for timed in row],
        "starts": [round(timed.start_ms - begin, _DIGITS) for timed in row],
        "ends": [round(timed.end_ms - begin, _DIGITS) for timed in row],
        "seconds": sorted(seconds_of_pairs(row)),
        "steps": [round(moment - begin, _DIGITS) for moment, _ in stair],
        "held": [round(held, _DIGITS) for _, held in stair],
    }


def _sent(plan: Plan) -> dict[str, Any]:
    """P2P messages per iteration: activations and gradients over every stage boundary between ranks; also relative to 1F1B."""
    number, least = num_messages(plan), 2 * plan.num_microbatches * (plan.num_ranks - 1)
    return {"num_messages": number, "relative_messages": number / least if least else 0.0}
