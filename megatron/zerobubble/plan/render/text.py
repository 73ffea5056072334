"""Render a timeline as text; `svg` and `chrome_trace` render it as SVG and as a Chrome trace.

The input is a list of `TimedOp` per rank, so that simulated plans and recorded runs share the code. Time begins at the earliest
start. The chunk of an op is the index of its stage among the stages of its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.simulate import TimedOp

Rows = Sequence[Sequence[TimedOp]]
"""Per rank its timed ops in ascending order of time."""


def render_text(rows: Rows, *, max_width: int = 160) -> str:
    """Time on x, one line per rank; ``.`` is idle time between a rank's first and last op.

    An op is shown as its kind and microbatch, in small letters for the second chunk (``F0``, ``f0``), or as its op text (``4F0``)
    if a rank has more than two chunks. If that exceeds `max_width` columns, labels are cut down to the letter.
    """
    begin, end = extent(rows)
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


def extent(rows: Rows) -> tuple[float, float]:
    """Earliest start and latest end in milliseconds, both 0 if there are no ops."""
    begin = min((timed.start_ms for row in rows for timed in row), default=0.0)
    return begin, max((timed.end_ms for row in rows for timed in row), default=begin)


def chunks_of(row: Sequence[TimedOp]) -> dict[int, int]:
    """Stage -> chunk, for the stages of one rank's row."""
    return {stage: chunk for chunk, stage in enumerate(sorted({timed.op.stage for timed in row}))}


def _labels(row: Sequence[TimedOp]) -> list[str]:
    chunks = chunks_of(row)
    return [_label(timed.op, chunks) for timed in row]


def _label(op: Op, chunks: dict[int, int]) -> str:
    if len(chunks) > 2:
        return str(op)
    text = f"{op.kind.value}{op.microbatch}"
    return text.lower() if chunks[op.stage] == 1 else text


def _text_box(label: str, width: int) -> str:
    """The label with a line to the op's end; a label that does not fit is cut from the right."""
    if width <= len(label):
        return label[:width]
    return label + "-" * (width - len(label) - 1) + " "


def _text_axis(begin: float, end: float, scale: float, width: int) -> str:
    cells = [" "] * (width + 12)
    for tick in ticks(end - begin):
        text = f"{tick:g}"
        at = round(tick * scale)
        if not "".join(cells[max(0, at - 1) : at + len(text)]).strip():
            cells[at : at + len(text)] = list(text)
    return "".join(cells).rstrip()


def ticks(length: float) -> list[float]:
    """About ten round numbers from 0 to `length`."""
    if length <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(length / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if length / (factor * power) <= 12)
    return [round(index * step, 12) for index in range(math.floor(length / step + 1e-9) + 1)]
