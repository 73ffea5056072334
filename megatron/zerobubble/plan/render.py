"""Draw a timeline: as text, as SVG, and as a Chrome trace.

The input is neutral, per rank a list of `TimedOp`, so a simulated plan and a recorded run are drawn by the same code. Time begins
at the earliest start. Chunk is the index of a stage among the stages of its row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.plan.simulate import TimedOp

Rows = Sequence[Sequence[TimedOp]]
"""Per rank its timed ops in ascending order of time."""

COLORS = {
    OpKind.F: ("#7ea6e8", "#2f5fae"),
    OpKind.B: ("#7fd6d8", "#1b8a91"),
    OpKind.W: ("#97d077", "#44832f"),
    OpKind.BW: ("#8ad3ab", "#2a8a66"),
}
"""Fill of each kind: the first chunk light with dark numbers, later chunks dark with white ones."""

_NAMES = {
    OpKind.F: "F forward",
    OpKind.B: "B input gradient",
    OpKind.W: "W weight gradient",
    OpKind.BW: "BW fused backward",
}
_LEFT, _TOP, _ROW, _GAP = 64, 46, 26, 6
_FONT = "font-family='Helvetica,Arial,sans-serif'"


def render_text(rows: Rows, *, max_width: int = 160) -> str:
    """Time on x, one line a rank; ``.`` is idle between a rank's first and last op.

    An op is its kind and microbatch, in small letters for the second chunk (``F0``, ``f0``), and the op text (``4F0``) where a
    rank has more than two chunks. Where that does not fit in `max_width` columns, only the letters are drawn.
    """
    begin, end = _extent(rows)
    labels = [_labels(row) for row in rows]
    needed = max(
        (
            (len(label) + 1) / (op.end_ms - op.start_ms)
            for row, names in zip(rows, labels, strict=True)
            for op, label in zip(row, names, strict=True)
            if op.end_ms > op.start_ms
        ),
        default=1.0,
    )
    head = max(len(f"rank {len(rows) - 1}"), len("ms")) + 2
    most = (max_width - head) / (end - begin) if end > begin else 1.0
    scale = min(needed, most)
    width = math.ceil((end - begin) * scale - 1e-6)
    lines = ["ms".ljust(head) + _text_axis(begin, end, scale, width)]
    for rank, (row, names) in enumerate(zip(rows, labels, strict=True)):
        cells = [" "] * width
        previous = None
        for timed, label in zip(row, names, strict=True):
            left, right = (round((edge - begin) * scale) for edge in (timed.start_ms, timed.end_ms))
            if previous is not None and left > previous:
                cells[previous:left] = list("." * (left - previous - 1) + " " if left > previous + 1 else ".")
            cells[left:right] = list(_text_box(label, right - left))
            previous = right
        lines.append(f"rank {rank}".ljust(head) + "".join(cells).rstrip())
    return "\n".join(line.rstrip() for line in lines)


def render_svg(rows: Rows, *, title: str = "", subtitle: str = "", width_px: int = 1200) -> str:
    """A standalone SVG document: a row of boxes a rank, microbatch numbers where they fit, an axis in ms and a legend."""
    begin, end = _extent(rows)
    scale = (width_px - _LEFT - 16) / (end - begin) if end > begin else 1.0
    bottom = _TOP + len(rows) * (_ROW + _GAP)
    height = bottom + 58
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width_px}' height='{height}' "
        f"viewBox='0 0 {width_px} {height}' {_FONT} font-size='11'>",
        f"<rect width='{width_px}' height='{height}' fill='white'/>",
        f"<text x='{_LEFT}' y='18' font-size='14' font-weight='bold'>{escape(title)}</text>",
        f"<text x='{_LEFT}' y='35' fill='#555'>{escape(subtitle)}</text>",
    ]
    for tick in _ticks(end - begin):
        x = _LEFT + tick * scale
        parts.append(f"<line x1='{x:.2f}' x2='{x:.2f}' y1='{_TOP - 3}' y2='{bottom}' stroke='#ddd'/>")
        parts.append(f"<text x='{x:.2f}' y='{bottom + 12}' fill='#555' text-anchor='middle'>{tick:g}</text>")
    parts.append(f"<text x='{_LEFT - 10}' y='{bottom + 12}' fill='#555' text-anchor='end'>ms</text>")
    for rank, row in enumerate(rows):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f"<text x='{_LEFT - 10}' y='{y + 17}' text-anchor='end'>rank {rank}</text>")
        if row:
            left, right = (_LEFT + (edge - begin) * scale for edge in (row[0].start_ms, row[-1].end_ms))
            parts.append(f"<rect x='{left:.2f}' y='{y}' width='{right - left:.2f}' height='{_ROW}' fill='#eee'/>")
        chunks = _chunks(row)
        for timed in row:
            x = _LEFT + (timed.start_ms - begin) * scale
            parts.append(_svg_box(timed, x, y, (timed.end_ms - timed.start_ms) * scale, chunks[timed.op.stage]))
    parts.extend(_svg_legend(rows, bottom + 28))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def render_chrome_trace(rows: Rows) -> str:
    """JSON in the trace event format that chrome://tracing and Perfetto open: a thread a rank, microseconds."""
    begin, _ = _extent(rows)
    events: list[dict[str, object]] = []
    for rank, row in enumerate(rows):
        name = {"name": f"rank {rank}", "sort_index": rank}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
        for op, start, end in row:
            events.append(
                {
                    "name": str(op),
                    "cat": op.kind.value,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": (start - begin) * 1e3,
                    "dur": (end - start) * 1e3,
                    "args": {"stage": op.stage, "microbatch": op.microbatch},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _extent(rows: Rows) -> tuple[float, float]:
    """Earliest start and latest end, both 0 where nothing ran."""
    begin = min((timed.start_ms for row in rows for timed in row), default=0.0)
    return begin, max((timed.end_ms for row in rows for timed in row), default=begin)


def _chunks(row: Sequence[TimedOp]) -> dict[int, int]:
    return {stage: chunk for chunk, stage in enumerate(sorted({timed.op.stage for timed in row}))}


def _labels(row: Sequence[TimedOp]) -> list[str]:
    chunks = _chunks(row)
    return [_label(timed.op, chunks) for timed in row]


def _label(op: Op, chunks: dict[int, int]) -> str:
    if len(chunks) > 2:
        return str(op)
    text = f"{op.kind.value}{op.microbatch}"
    return text.lower() if chunks[op.stage] == 1 else text


def _text_box(label: str, width: int) -> str:
    """The label and a line to where the op ends; what does not fit is cut from the right, down to the letter."""
    if width <= len(label):
        return label[:width]
    return label + "-" * (width - len(label) - 1) + " "


def _text_axis(begin: float, end: float, scale: float, width: int) -> str:
    cells = [" "] * (width + 12)
    for tick in _ticks(end - begin):
        text = f"{tick:g}"
        at = round(tick * scale)
        if not "".join(cells[max(0, at - 1) : at + len(text)]).strip():
            cells[at : at + len(text)] = list(text)
    return "".join(cells).rstrip()


def _ticks(length: float) -> list[float]:
    """About ten round numbers from 0 to `length`."""
    if length <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(length / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if length / (factor * power) <= 12)
    return [round(index * step, 12) for index in range(math.floor(length / step + 1e-9) + 1)]


def _svg_box(timed: TimedOp, x: float, y: int, width: float, chunk: int) -> str:
    op = timed.op
    box = (
        f"<rect x='{x:.2f}' y='{y}' width='{max(width, 0):.2f}' height='{_ROW}' fill='{COLORS[op.kind][chunk > 0]}' "
        f"stroke='white' stroke-width='0.6'><title>{op} {timed.start_ms:.3f}..{timed.end_ms:.3f} ms</title></rect>"
    )
    number = str(op.microbatch)
    if width < 7 * len(number) + 2:
        return box
    color = "white" if chunk else "#1b1b1b"
    return f"{box}<text x='{x + width / 2:.2f}' y='{y + 17}' text-anchor='middle' fill='{color}'>{number}</text>"


def _svg_legend(rows: Rows, y: int) -> list[str]:
    present = {timed.op.kind for row in rows for timed in row}
    later_chunks = any(len(_chunks(row)) > 1 for row in rows)
    parts: list[str] = []
    x = _LEFT
    for kind in OpKind:
        if kind not in present:
            continue
        for dark in (False, True) if later_chunks else (False,):
            parts.append(f"<rect x='{x}' y='{y}' width='16' height='14' fill='{COLORS[kind][dark]}'/>")
            x += 18
        parts.append(f"<text x='{x + 4}' y='{y + 11}'>{_NAMES[kind]}</text>")
        x += 20 + 7 * len(_NAMES[kind])
    if later_chunks:
        parts.append(f"<text x='{x + 4}' y='{y + 11}' fill='#555'>(light: first chunk, dark: later ones)</text>")
    return parts
