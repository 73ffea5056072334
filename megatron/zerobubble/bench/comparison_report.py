"""The comparison as text: a table in Markdown, JSON, a bar chart and a page with all timelines on one axis."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from megatron.zerobubble.bench.speed_ups import Estimate, Row, Table
from megatron.zerobubble.files import replace_text
from megatron.zerobubble.plan.render.svg import Panel, render_svg

__all__ = ["FORMAT", "can_draw", "markdown", "to_json", "write"]

FORMAT = "zerobubble-bench/1"

_FACTS = (
    *("predicted_speed_up", "reached", "tokens_per_s", "tokens_per_s_per_rank"),
    "memory_ratio",
)
"""Numbers of a row that follow from others."""


def can_draw() -> bool:
    """Whether matplotlib, which draws the chart, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def markdown(table: Table, about: Mapping[str, Any]) -> str:
    """The table, the verdict, and what was measured.

    Args:
        table: the comparison.
        about: a line per entry below the verdict.
    """
    rows = [_cells(row) for row in table.rows]
    names = [name for name in rows[0] if name == "contender" or any(cells[name] != "-" for cells in rows)]
    lines = [[_heading(name) for name in names], ["---"] + ["---:"] * (len(names) - 1)]
    lines += [[cells[name] for name in names] for cells in rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    remarks = [f"{row.outcome.name}: {row.outcome.failure}" for row in table.rows if row.outcome.failure is not None]
    remarks += [f"{row.outcome.name}: {row.outcome.note}" for row in table.rows if row.outcome.note is not None]
    parts = [text, table.verdict(), table.noise(), table.same_losses(), *remarks]
    parts += ["\n".join(f"- {name}: {value}" for name, value in about.items())]
    return "\n\n".join(filter(None, parts)) + "\n"


def _heading(name: str) -> str:
    return "95 %" if name.startswith("95 %") else name


def _cells(row: Row) -> dict[str, str]:
    """Column -> cell; "-" where nothing is known."""
    outcome, ms = row.outcome, row.outcome.ms
    ratio = row.speed_up
    is_compared = ratio is not None and not ratio.low == ratio.high == 1.0  # the baseline is not
    first = outcome.losses[min(outcome.losses)] if outcome.losses else None
    cells = {
        "ms/iteration": _digits(None if ms is None else ms.value),
        "95 % of ms": _interval(ms),
        "speed-up": _formatted(None if ratio is None else ratio.value, ".3f"),
        "95 % of speed-up": _interval(ratio if is_compared else None),
        "predicted": _formatted(row.predicted_speed_up, ".3f"),
        "reached": _formatted(row.reached if is_compared else None, ".0%"),
        "tokens/s": _digits(row.tokens_per_s),
        "tokens/s/rank": _digits(row.tokens_per_s_per_rank),
        "bubble": _formatted(outcome.bubble, ".1%"),
        "predicted bubble": _formatted(outcome.predicted_bubble, ".1%"),
        "peak MiB": _mib(outcome.peak_bytes),
        "x baseline": _formatted(row.memory_ratio, ".2f"),
        "activations MiB": _mib(outcome.activation_bytes),
        "predicted MiB": _mib(outcome.predicted_activation_bytes),
        "loss": _formatted(first, ".6f"),
    }
    if ms is None:
        cells = dict.fromkeys(cells, "-") | {"ms/iteration": "failed" if outcome.failure else "-"}
    return {"contender": outcome.label} | cells


def _formatted(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return "-"
    return f"{_digits(estimate.low)} to {_digits(estimate.high)}"


def _digits(value: float | None) -> str:
    """Four significant digits, without an exponent."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}" if value >= 1e-3 else f"{value:.2e}"


def _mib(count: float | None) -> str:
    return "-" if count is None else _digits(count / 2**20)


def to_json(table: Table, about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole comparison; every round's time of every contender is in it."""
    return {
        "format": FORMAT,
        **about,
        "baseline": table.baseline,
        "verdict": table.verdict(),
        "contenders": [_row_json(row) for row in table.rows],
        "predicted_interleaved_ms": {str(v): ms for v, ms in table.interleaved.items()},
    }


def _row_json(row: Row) -> dict[str, Any]:
    outcome = asdict(row.outcome)
    for name in ("seconds", "losses", "overhead"):
        outcome[name] = {str(each): value for each, value in outcome[name].items()}
    estimates = {"ms": row.outcome.ms, "speed_up": row.speed_up}
    outcome |= {name: None if value is None else asdict(value) for name, value in estimates.items()}
    return outcome | {name: getattr(row, name) for name in _FACTS} | {"peak_bytes": row.outcome.peak_bytes}


def write(directory: Path, table: Table, about: Mapping[str, Any], panels: Sequence[Panel], *, title: str) -> list[Path]:
    """Write bench.md, bench.json, bench.html and, with matplotlib, bench.png, each atomically. Returns their paths."""
    text = markdown(table, about)
    files = {
        "bench.md": f"# {title}\n\n{text}",
        "bench.json": json.dumps(to_json(table, about), indent=1) + "\n",
        "bench.html": _page(table, text, panels, title=title),
    }
    written = []
    for name, content in files.items():
        replace_text(directory / name, content)
        written.append(directory / name)
    if can_draw() and any(row.speed_up is not None for row in table.rows):
        _draw(table, directory / "bench.png", title=title)
        written.append(directory / "bench.png")
    return written


_STYLE = (
    "body{font:14px/1.45 Helvetica,Arial,sans-serif;margin:24px;color:#1b1b1b}table{border-collapse:collapse}"
    "td,th{padding:3px 9px;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}td:first-child,th:first-child"
    "{text-align:left}.box{overflow-x:auto}p{max-width:80em}"
)


def _page(table: Table, text: str, panels: Sequence[Panel], *, title: str) -> str:
    """A page that stands alone."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[escape(cell.strip()) for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| ---")]
    head = "".join(f"<th>{cell}</th>" for cell in cells[0])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells[1:])
    prose = "".join(_prose(part) for part in text.split("\n\n")[1:] if part.strip())
    drawn = ""
    if panels:
        drawn = render_svg(panels, title="One iteration of each contender", subtitle="gray is idle", width_px=1400)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1><div class='box'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{prose}<div class='box'>{drawn}</div></body></html>\n"
    )


def _prose(part: str) -> str:
    """A paragraph, or a list."""
    if not part.startswith("- "):
        return f"<p>{escape(part)}</p>"
    return f"<ul>{''.join(f'<li>{escape(line[2:])}</li>' for line in part.strip().splitlines())}</ul>"


def _draw(table: Table, file: Path, *, title: str) -> None:
    """Bars of measured speed-ups with their intervals, and marks for predicted ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in table.rows if row.speed_up is not None]
    measured = [row.speed_up for row in rows if row.speed_up is not None]
    values = [each.value for each in measured]
    below = [0.0 if each.low is None else each.value - each.low for each in measured]
    above = [0.0 if each.high is None else each.high - each.value for each in measured]
    figure, axes = pyplot.subplots(figsize=(2.0 + 1.1 * len(rows), 4.2))
    axes.bar(range(len(rows)), values, yerr=[below, above], capsize=3, color="#7aa6c2", label="measured")
    known = [(place, row.predicted_speed_up) for place, row in enumerate(rows) if row.predicted_speed_up is not None]
    axes.plot([place for place, _ in known], [value for _, value in known], "_", color="black", markersize=18, label="predicted")
    axes.set_xticks(range(len(rows)), [row.outcome.name for row in rows], rotation=30, ha="right")
    seen = [*values, *(value for _, value in known), 1.0]  # intervals of a machine that was not quiet may leave the picture
    axes.set(ylabel=f"speed-up over {table.baseline}", ylim=(0.85 * min(seen), 1.15 * max(seen)), title=title)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.legend()
    figure.tight_layout()
    unfinished = file.with_name(f".{file.name}.new")
    figure.savefig(unfinished, dpi=150, format="png")
    unfinished.replace(file)
    pyplot.close(figure)
