"""The comparison as a table in Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.zerobubble.bench.speed_ups import Estimate, Row, Table
from megatron.zerobubble.files import replace_text

__all__ = ["FORMAT", "JSON", "markdown", "summary", "to_json", "write"]

FORMAT = "zerobubble-bench/1"
JSON = "bench.json"
"""The name of the file with every number."""

_FACTS = (
    *("predicted_speed_up", "reached", "tokens_per_s", "tokens_per_s_per_rank"),
    "memory_ratio",
)
"""Numbers of a row that follow from others."""
_IDLE_PARTS = ("imbalance", "schedule", "waiting")


def markdown(table: Table, about: Mapping[str, Any]) -> str:
    """The verdict, both tables, and what was measured.

    Args:
        table: the comparison.
        about: a line per entry at the end.
    """
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    first, second = (_markdown_table(_rows(table, cells_of)) for cells_of in (_cells, _details))
    return _joined(table.verdict(), first, _key(table), second, *_remarks(table), facts)


def summary(table: Table) -> str:
    """For a terminal of 80 columns: what decides in eight, what they are, and the verdict last."""
    lines = "\n".join("  ".join(cells).rstrip() for cells in _rows(table, _cells))
    return _joined(lines, _key(table), *_remarks(table), table.verdict())


def _rows(table: Table, cells_of: Callable[[Row], dict[str, str]]) -> list[list[str]]:
    """The names of the columns and a row per contender, all cells of a column of the same width."""
    rows = [{"contender": row.outcome.label} | cells_of(row) for row in table.rows]
    lines = [{name: name for name in rows[0]}, *rows]
    widths = {name: max(len(cells[name]) for cells in lines) for name in rows[0]}
    return [[f"{cells[name]:{'<' if name == 'contender' else '>'}{widths[name]}}" for name in widths] for cells in lines]


def _markdown_table(rows: list[list[str]]) -> str:
    rules = [f"{'-' * (len(cell) - 1)}{':' if at else '-'}" for at, cell in enumerate(rows[0])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], rules, *rows[1:]))


def _key(table: Table) -> str:
    kind = "GPU" if table.num_cores is None else "rank"
    return (
        f"plan: predicted speed-up; tok/s: tokens per second and {kind}; {_memory_unit(table)[0]}: peak memory of\n"
        "the fullest rank; idle: mean share of the passes; loss: the baseline's?"
    )


def _memory_unit(table: Table) -> tuple[str, int]:
    """MiB where no contender takes a GiB."""
    most = max((row.outcome.peak_bytes or 0 for row in table.rows), default=0)
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)


def _cells(row: Row) -> dict[str, str]:
    """Column -> cell: what decides; "-" where nothing is known."""
    outcome, ratio, (unit, size) = row.outcome, row.speed_up, _memory_unit(row.table)
    speed = "-" if ratio is None else f"{ratio.value:.2f}"
    if ratio is not None and ratio.low is not None and outcome is not row.base:
        speed += f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return {
        "ms": "failed" if outcome.failure else _digits(None if outcome.ms is None else outcome.ms.value),
        "speed-up [95 %]": speed,
        "plan": _formatted(row.predicted_speed_up, ".2f"),
        "tok/s": _digits(row.tokens_per_s_per_rank),
        unit: _digits(None if outcome.peak_bytes is None else outcome.peak_bytes / size),
        "idle": _formatted(None if outcome.idle is None else outcome.idle.share, ".0%"),
        "loss": {True: "yes", False: "no", None: "-"}[row.has_same_loss],
    }


def _joined(*parts: str) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"


def _remarks(table: Table) -> list[str]:
    """Paragraphs."""
    said = [
        (row.outcome.name, each) for row in table.rows for each in (row.outcome.failure, row.outcome.note) if each is not None
    ]
    return [table.exposed(), table.noise(), table.same_losses(), table.imbalance(), *(f"{name}: {each}" for name, each in said)]


def _details(row: Row) -> dict[str, str]:
    """Column -> cell: what the decision rests on."""
    outcome = row.outcome
    parts = dict.fromkeys(_IDLE_PARTS) if outcome.idle is None else asdict(outcome.idle)
    return {
        "ms [95 %]": _interval(outcome.ms),
        "reached": _formatted(row.reached, ".0%"),
        "tokens/s": _digits(row.tokens_per_s),
        "x baseline's memory": _formatted(row.memory_ratio, ".2f"),
        "activations MiB": _mib(outcome.activation_bytes),
        "predicted MiB": _mib(outcome.predicted_activation_bytes),
        **{f"idle: {name}": _formatted(parts[name], ".1%") for name in _IDLE_PARTS},
        "loss": _formatted(outcome.first_loss, ".6f"),
    }


def _formatted(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _interval(estimate: Estimate | None) -> str:
    """A value, with its interval if it has one."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return _digits(None if estimate is None else estimate.value)
    return f"{_digits(estimate.value)} [{_digits(estimate.low)}, {_digits(estimate.high)}]"


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
        "num_ranks": table.pipeline_size,
        "num_microbatches": table.num_microbatches,
        "costs": table.costs,
    }


def _row_json(row: Row) -> dict[str, Any]:
    outcome = asdict(row.outcome)
    for name in ("seconds", "losses", "overhead"):
        outcome[name] = {str(each): value for each, value in outcome[name].items()}
    estimates = {"ms": row.outcome.ms, "speed_up": row.speed_up}
    outcome |= {name: None if value is None else asdict(value) for name, value in estimates.items()}
    return outcome | {name: getattr(row, name) for name in _FACTS} | {"peak_bytes": row.outcome.peak_bytes}


def write(directory: Path, table: Table, about: Mapping[str, Any], *, title: str) -> list[Path]:
    """Write bench.md and bench.json, each atomically. Returns their paths."""
    files = {
        directory / "bench.md": f"# {title}\n\n{markdown(table, about)}",
        directory / JSON: json.dumps(to_json(table, about), indent=1) + "\n",
    }
    for file, content in files.items():
        replace_text(file, content)
    return list(files)
