"""Render timelines as SVG: a single one, or a plan above its recorded run on the same axis.

Paper, ink and lines are dark where the reader's system prefers it; the colors of ops are the same. Ops and spans have tooltips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.render.text import Rows, chunks_of, extent, ticks
from megatron.zerobubble.plan.simulate import TimedOp, seconds_of_pairs
from megatron.zerobubble.plan.timeline import Activity, RankTimeline, Span

COLORS = {
    OpKind.F: ("#7ea6e8", "#2f5fae"),
    OpKind.B: ("#7fd6d8", "#1b8a91"),
    OpKind.W: ("#97d077", "#44832f"),
    OpKind.BW: ("#8ad3ab", "#2a8a66"),
}
"""Fill colors of each kind: the first chunk light with dark numbers, later chunks dark with white ones."""

SPAN_COLORS = {
    Activity.WAIT: "#f6d5d5",
    Activity.VALIDATE: "#f0b64d",
    Activity.REWIND: "#e0894f",
    Activity.GRADIENTS: "#cbb2e6",
    Activity.OPTIMIZER: "#9a73c7",
}
"""Fill colors of spans between ops. Transfers are not shown, because they overlap with ops."""

_EXCHANGE_COLORS = {Activity.REDUCE: "#8a63bd", Activity.GATHER: "#d2a03c"}
"""Fill colors of the thin bars under a row: data-parallel communication of buckets, which overlaps with ops."""

_NAMES = {
    OpKind.F: "F forward",
    OpKind.B: "B dgrad (input)",
    OpKind.W: "W wgrad (weights)",
    OpKind.BW: "BW full backward",
    Activity.WAIT: "waiting for a message",
    Activity.VALIDATE: "post-validation",
    Activity.REWIND: "rolled back",
    Activity.GRADIENTS: "gradients finalized",
    Activity.OPTIMIZER: "optimizer",
    Activity.REDUCE: "bucket reduced",
    Activity.GATHER: "bucket gathered",
}
_BAR = 4
_LEFT, _TOP, _ROW, _GAP, _CAPTION, _AXIS = 64, 46, 26, 6, 20, 20
_FONT = "font-family='Helvetica,Arial,sans-serif'"
_STYLE = (
    ".zb{fill:#1b1b1b}.zb .paper{fill:#fff}.zb .muted{fill:#555}.zb .idle{fill:#eee}.zb .grid{stroke:#ddd}.zb .op{stroke:#fff}"
    "@media(prefers-color-scheme:dark){.zb{fill:#e3e3e6}.zb .paper{fill:#17181c}.zb .muted{fill:#a5a6ad}.zb .idle{fill:#2b2d34}"
    ".zb .grid{stroke:#3a3c44}.zb .op{stroke:#17181c}}"
)
"""By class, so that the picture can be inside a page, too."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One timeline of several on the same axis."""

    caption: str = ""
    """The line above it."""
    ranks: Sequence[RankTimeline]
    """One row per rank. Spans are shown from the first op of all ranks on."""
    notes: Sequence[str] = ()
    """Per microbatch what the titles of its ops add to their names; empty: nothing."""

    @staticmethod
    def of_ops(rows: Rows, *, caption: str = "", notes: Sequence[str] = ()) -> Panel:
        """A timeline of ops alone, per rank."""
        return Panel(caption=caption, ranks=[RankTimeline(ops=tuple(row)) for row in rows], notes=notes)

    @property
    def begin_ms(self) -> float:
        """The start of its first op."""
        return extent([rank.ops for rank in self.ranks])[0]

    @property
    def length_ms(self) -> float:
        """From the first op to the end of the last op, or of the last span that is shown."""
        begin, end = extent([rank.ops for rank in self.ranks])
        visible = {*SPAN_COLORS, *_EXCHANGE_COLORS}
        return max([end, *(span.end_ms for rank in self.ranks for span in rank.spans if span.activity in visible)]) - begin


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """A panel with its place."""

    panel: Panel
    begin_ms: float
    scale: float
    """Pixels per millisecond."""
    length_ms: float
    top: int

    @property
    def bottom(self) -> int:
        return self.top + len(self.panel.ranks) * (_ROW + _GAP)

    def draw(self) -> list[str]:
        caption = f"<text x='{_LEFT}' y='{self.top - 8}' font-weight='bold'>{escape(self.panel.caption)}</text>"
        parts = [caption] if self.panel.caption else []
        for tick in ticks(self.length_ms):
            x = _LEFT + tick * self.scale
            parts.append(f"<line x1='{x:.2f}' x2='{x:.2f}' y1='{self.top - 3}' y2='{self.bottom}' class='grid'/>")
            parts.append(f"<text x='{x:.2f}' y='{self.bottom + 12}' class='muted' text-anchor='middle'>{tick:g}</text>")
        parts.append(f"<text x='{_LEFT - 10}' y='{self.bottom + 12}' class='muted' text-anchor='end'>ms</text>")
        for rank, timeline in enumerate(self.panel.ranks):
            parts.extend(self._row(rank, timeline, self.top + rank * (_ROW + _GAP)))
        return parts

    def _row(self, rank: int, timeline: RankTimeline, y: int) -> list[str]:
        parts = [f"<text x='{_LEFT - 10}' y='{y + 17}' text-anchor='end'>rank {rank}</text>"]
        if timeline.ops:
            left, right = self._x(timeline.ops[0].start_ms), self._x(timeline.ops[-1].end_ms)
            parts.append(f"<rect x='{left:.2f}' y='{y}' width='{right - left:.2f}' height='{_ROW}' class='idle'/>")
        # Longer ones first, so that a span within another one stays visible.
        spans = [span for span in timeline.spans if span.activity in SPAN_COLORS]
        for span in sorted(spans, key=lambda span: span.start_ms - span.end_ms):
            parts.append(self._span(span, y))
        chunks, seconds = chunks_of(timeline.ops), seconds_of_pairs(timeline.ops)
        for place, timed in enumerate(timeline.ops):
            is_half = place in seconds or place + 1 in seconds
            height = _ROW // 2 if is_half else _ROW
            parts.append(self._op(timed, y + (height if place in seconds else 0), height, chunks[timed.op.stage]))
        parts.extend(self._span(span, y + _ROW + 1) for span in timeline.spans if span.bucket is not None)
        return parts

    def _span(self, span: Span, y: int) -> str:
        left, right = max(self._x(span.start_ms), _LEFT), max(self._x(span.end_ms), _LEFT)
        what, fill, height = span.text, (SPAN_COLORS | _EXCHANGE_COLORS)[span.activity], _ROW
        if span.bucket is not None:
            what, height = f"{what}, {span.bucket.num_bytes} bytes", _BAR
        title = f"<title>{what} {span.start_ms - self.begin_ms:.3f}..{span.end_ms - self.begin_ms:.3f} ms</title>"
        return f"<rect x='{left:.2f}' y='{y}' width='{right - left:.2f}' height='{height}' fill='{fill}'>{title}</rect>"

    def _op(self, timed: TimedOp, y: int, height: int, chunk: int) -> str:
        op, x = timed.op, self._x(timed.start_ms)
        width = max((timed.end_ms - timed.start_ms) * self.scale, 0)
        note = self.panel.notes[op.microbatch] if self.panel.notes else ""
        box = (
            f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{height}' fill='{COLORS[op.kind][chunk > 0]}' "
            f"class='op' stroke-width='0.6'><title>{op}{escape(note)} {timed.start_ms - self.begin_ms:.3f}.."
            f"{timed.end_ms - self.begin_ms:.3f} ms</title></rect>"
        )
        number = str(op.microbatch) + (f".{op.slice}" if op.slice else "")
        if width < 7 * len(number) + 2:
            return box
        color = "white" if chunk else "#1b1b1b"
        return f"{box}<text x='{x + width / 2:.2f}' y='{y + height // 2 + 4}' text-anchor='middle' fill='{color}'>{number}</text>"

    def _x(self, time_ms: float) -> float:
        return _LEFT + (time_ms - self.begin_ms) * self.scale


def render_svg(panels: Sequence[Panel], *, title: str = "", subtitle: str = "", width_px: int = 1200) -> str:
    """A standalone SVG document: timelines below each other on the same axis in ms, each from its first op on, and a legend.

    A timeline has one row of boxes per rank, with microbatch numbers where they fit; those of a pair are half as high.

    Args:
        panels: the timelines, at least one.
        title: title of the picture.
        subtitle: a smaller line below the title.
        width_px: width of the picture in pixels.
    """
    length = max(panel.length_ms for panel in panels)
    scale = (width_px - _LEFT - 16) / length if length > 0 else 1.0
    bottom, body = _TOP - _AXIS - _CAPTION - _GAP, list[str]()
    for number, panel in enumerate(panels):
        top = bottom + _AXIS + _GAP + _CAPTION * (1 if number or not panel.caption else 2)
        drawn = _Drawing(panel=panel, begin_ms=panel.begin_ms, length_ms=length, scale=scale, top=top)
        body += drawn.draw()
        bottom = drawn.bottom
    body.extend(_legend([rank for panel in panels for rank in panel.ranks], bottom + 28))
    return _document(body, title=title, subtitle=subtitle, width_px=width_px, height=bottom + 58)


def _document(body: Sequence[str], *, title: str, subtitle: str, width_px: int, height: int) -> str:
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width_px}' height='{height}' "
        f"viewBox='0 0 {width_px} {height}' {_FONT} font-size='11' class='zb'>",
        f"<style>{_STYLE}</style>",
        f"<rect width='{width_px}' height='{height}' class='paper'/>",
        f"<text x='{_LEFT}' y='18' font-size='14' font-weight='bold'>{escape(title)}</text>",
        f"<text x='{_LEFT}' y='35' class='muted'>{escape(subtitle)}</text>",
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _legend(ranks: Sequence[RankTimeline], y: int) -> list[str]:
    kinds = {timed.op.kind for rank in ranks for timed in rank.ops}
    activities = {span.activity for rank in ranks for span in rank.spans}
    later_chunks = any(len(chunks_of(rank.ops)) > 1 for rank in ranks)
    entries: list[tuple[str, tuple[str, ...]]] = [
        (_NAMES[kind], COLORS[kind] if later_chunks else COLORS[kind][:1]) for kind in OpKind if kind in kinds
    ]
    entries += [
        (_NAMES[activity], (fill,)) for activity, fill in (SPAN_COLORS | _EXCHANGE_COLORS).items() if activity in activities
    ]
    parts: list[str] = []
    x = _LEFT
    for name, fills in entries:
        for fill in fills:
            parts.append(f"<rect x='{x}' y='{y}' width='16' height='14' fill='{fill}'/>")
            x += 18
        parts.append(f"<text x='{x + 4}' y='{y + 11}'>{name}</text>")
        x += 14 + 6 * len(name)
    if later_chunks:
        parts.append(f"<text x='{x + 4}' y='{y + 11}' class='muted'>(light: first chunk, dark: later ones)</text>")
    return parts
