"""The comparison as text: a table in Markdown, JSON, and a page with all timelines on one axis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from megatron.zerobubble.bench.speed_ups import Estimate, Row, Table
from megatron.zerobubble.files import replace_text
from megatron.zerobubble.plan.render.svg import Panel, render_panels

__all__ = ["FORMAT", "markdown", "to_json", "write"]

FORMAT = "zerobubble-bench/1"

_COLUMNS = (
    *("contender", "ms/iteration", "95 %", "speed-up", "95 %", "predicted", "reached", "tokens/s", "tokens/s/rank"),
    *("TFLOP/s/rank", "MFU", "bubble", "predicted bubble", "peak MiB", "x baseline", "activations MiB", "predicted MiB", "loss"),
)


def markdown(table: Table, about: Mapping[str, Any]) -> str:
    """The table, the verdict, and what was measured.

    Args:
        table: the comparison.
        about: a line per entry below the verdict.
    """
    columns = [column for column in range(len(_COLUMNS)) if column == 0 or any(_cells(row)[column] != "-" for row in table.rows)]
    lines = [[_COLUMNS[column] for column in columns], ["---"] + ["---:"] * (len(columns) - 1)]
    lines += [[_cells(row)[column] for column in columns] for row in table.rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    remarks = [f"{row.outcome.name}: {row.outcome.failure}" for row in table.rows if row.outcome.failure is not None]
    remarks += [f"{row.outcome.name}: {row.outcome.note}" for row in table.rows if row.outcome.note is not None]
    parts = [text, table.verdict(), table.noise(), table.same_losses(), *remarks]
    parts += ["\n".join(f"- {name}: {value}" for name, value in about.items())]
    return "\n\n".join(filter(None, parts)) + "\n"


def _cells(row: Row) -> list[str]:
    outcome = row.outcome
    name = outcome.name if outcome.ran is None else f"{outcome.name} ({outcome.ran})"
    is_baseline = row.speed_up is not None and row.speed_up.low == row.speed_up.high == 1.0
    if row.ms is None:
        return [name, "failed" if outcome.failure else "-", *["-"] * (len(_COLUMNS) - 2)]
    first = min(outcome.losses) if outcome.losses else None
    return [
        name,
        _digits(row.ms.value),
        _interval(row.ms),
        "-" if row.speed_up is None else f"{row.speed_up.value:.3f}",
        "-" if row.speed_up is None or is_baseline else _interval(row.speed_up),
        "-" if row.predicted_speed_up is None else f"{row.predicted_speed_up:.3f}",
        "-" if row.reached is None or is_baseline else f"{row.reached:.0%}",
        _digits(row.tokens_per_s),
        _digits(row.tokens_per_s_per_rank),
        _digits(row.tflops_per_rank),
        "-" if row.utilization is None else f"{row.utilization:.1%}",
        "-" if outcome.bubble is None else f"{outcome.bubble:.1%}",
        "-" if outcome.predicted_bubble is None else f"{outcome.predicted_bubble:.1%}",
        _mib(row.peak_bytes),
        "-" if row.memory_ratio is None else f"{row.memory_ratio:.2f}",
        _mib(outcome.activation_bytes),
        _mib(outcome.predicted_activation_bytes),
        "-" if first is None else f"{outcome.losses[first]:.6f}",
    ]


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
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
    }


def _row_json(row: Row) -> dict[str, Any]:
    outcome = asdict(row.outcome)
    outcome["seconds"] = {str(each): seconds for each, seconds in row.outcome.seconds.items()}
    outcome["losses"] = {str(each): loss for each, loss in row.outcome.losses.items()}
    return outcome | {
        "ms": None if row.ms is None else asdict(row.ms),
        "speed_up": None if row.speed_up is None else asdict(row.speed_up),
        "predicted_speed_up": row.predicted_speed_up,
        "reached": row.reached,
        "tokens_per_s": row.tokens_per_s,
        "tokens_per_s_per_rank": row.tokens_per_s_per_rank,
        "tflops_per_rank": row.tflops_per_rank,
        "utilization": row.utilization,
        "peak_bytes": row.peak_bytes,
        "memory_ratio": row.memory_ratio,
    }


def write(directory: Path, table: Table, about: Mapping[str, Any], panels: Sequence[Panel], *, title: str) -> list[Path]:
    """Write bench.md, bench.json and bench.html, each atomically. Returns their paths."""
    text = markdown(table, about)
    files = {
        "bench.md": f"# {title}\n\n{text}",
        "bench.json": json.dumps(to_json(table, about), indent=1) + "\n",
        "bench.html": _page(text, panels, title=title),
    }
    written = []
    for name, content in files.items():
        replace_text(directory / name, content)
        written.append(directory / name)
    return written


_STYLE = (
    "body{font:14px/1.45 Helvetica,Arial,sans-serif;margin:24px;color:#1b1b1b}table{border-collapse:collapse}"
    "td,th{padding:3px 9px;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}td:first-child,th:first-child"
    "{text-align:left}.box{overflow-x:auto}p{max-width:80em}"
)


def _page(text: str, panels: Sequence[Panel], *, title: str) -> str:
    """A page that stands alone."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[escape(cell.strip()) for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| ---")]
    head = "".join(f"<th>{cell}</th>" for cell in cells[0])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells[1:])
    prose = "".join(_prose(part) for part in text.split("\n\n")[1:] if part.strip())
    drawn = ""
    if panels:
        drawn = render_panels(panels, title="One iteration of each contender", subtitle="gray is idle", width_px=1400)
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
