"""Render a timeline as text; `svg` and `chrome_trace` render it as SVG and as a Chrome trace.

The input is a list of `TimedOp` per rank, so that simulated plans and recorded runs share the code. Time begins at the earliest
start. The chunk of an op is the index of its stage among the stages of its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.plan.simulate import TimedOp, seconds_of_pairs

Rows = Sequence[Sequence[TimedOp]]
"""Per rank its timed ops in ascending order of time."""

_PALETTE = {OpKind.F: (110, 25), OpKind.B: (116, 30), OpKind.W: (114, 64), OpKind.BW: (115, 29)}
"""Backgrounds by kind, for the first chunk and for later ones: the colors of the SVG among a terminal's 256."""


def render_text(rows: Rows, *, max_width: int = 160, is_colored: bool = False) -> str:
    """Time on x, one line per rank; ``.`` is idle time between a rank's first and last op.

    An op is shown as its kind and microbatch, in small letters for the second chunk (``F0``, ``f0``), or as its op text (``4F0``)
    if a rank has more than two chunks, and a pair as both with a plus between them. Where most labels do not fit in `max_width`
    columns, all are cut down to the letter; where most ops would have less than a column, the text says how many it takes. Colors
    are a terminal's escape sequences.
    """
    begin, end = extent(rows)
    labels = [_labels(row) for row in rows]
    rows = [_boxes(row) for row in rows]
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
    lengths = [op.end_ms - op.start_ms for row in rows for op in row if op.end_ms > op.start_ms]
    each = scale * median(lengths or [0.0]) + 1e-6
    if lengths and each < 1:
        columns = head + math.ceil((end - begin) / median(lengths))
        return f"(too wide for {max_width} columns: it takes {columns}; --width {columns} or --svg FILE shows it)"
    if each < max((len(label) for names in labels for label in names), default=0):
        labels = [[_letters(label) for label in names] for names in labels]
    width = math.ceil((end - begin) * scale - 1e-6)
    lines = ["ms".ljust(head) + _text_axis(begin, end, scale, width)]
    for rank, (row, names) in enumerate(zip(rows, labels, strict=True)):
        cells = [" "] * width
        previous, chunks = None, chunks_of(row)
        for timed, label in zip(row, names, strict=True):
            left, right = (round((edge - begin) * scale) for edge in (timed.start_ms, timed.end_ms))
            if previous is not None and left > previous:
                cells[previous:left] = list("." * (left - previous - 1) + " " if left > previous + 1 else ".")
            cells[left:right] = box = _text_box(label, right - left)
            if is_colored and box:
                is_later = chunks[timed.op.stage] > 0
                cells[left] = f"\033[{97 if is_later else 30};48;5;{_PALETTE[timed.op.kind][is_later]}m{cells[left]}"
                cells[right - 1 - (box[-1] == " ")] += "\033[0m"
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


def _boxes(row: Sequence[TimedOp]) -> list[TimedOp]:
    """What is drawn side by side: an op, or a pair as one box."""
    seconds = seconds_of_pairs(row)
    ends = [max(timed.end_ms, row[place + 1].end_ms) if place + 1 in seconds else timed.end_ms for place, timed in enumerate(row)]
    return [timed._replace(end_ms=end) for place, (timed, end) in enumerate(zip(row, ends, strict=True)) if place not in seconds]


def _labels(row: Sequence[TimedOp]) -> list[str]:
    """The labels of `_boxes`."""
    chunks, seconds, labels = chunks_of(row), seconds_of_pairs(row), list[str]()
    for place, timed in enumerate(row):
        label = _label(timed.op, chunks)
        if place in seconds:
            label = f"{labels.pop()}+{label}"
        labels.append(label)
    return labels


def _letters(label: str) -> str:
    return "+".join(part.strip("0123456789") for part in label.split("+"))


def _label(op: Op, chunks: dict[int, int]) -> str:
    if len(chunks) > 2:
        return str(op)
    text = str(op).removeprefix(str(op.stage))
    return text.lower() if chunks[op.stage] == 1 else text


def _text_box(label: str, width: int) -> list[str]:
    """The label with a line to the op's end; of a label that does not fit its kind alone."""
    if width < len(label):
        label = _letters(label)[:width]
    return list(label + "-" * (width - len(label) - 1) + " " * (width > len(label)))


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
