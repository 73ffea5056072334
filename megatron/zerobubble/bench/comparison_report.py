"""The comparison as a table in Markdown, as JSON and as a picture."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.zerobubble.bench.speed_ups import Estimate, Row, Table
from megatron.zerobubble.files import replace_text

__all__ = ["FORMAT", "JSON", "can_draw", "markdown", "summary", "to_json", "write"]

FORMAT = "zerobubble-bench/1"
JSON = "bench.json"
"""The name of the file with every number."""

_FACTS = (
    *("predicted_speed_up", "reached", "tokens_per_s", "tokens_per_s_per_rank"),
    "memory_ratio",
)
"""Numbers of a row that follow from others."""
_IDLE_PARTS = ("imbalance", "schedule", "waiting")


def can_draw() -> bool:
    """Whether matplotlib, which draws the chart, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


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
    return [table.noise(), table.same_losses(), table.imbalance(), *(f"{name}: {each}" for name, each in said)]


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
        "predicted_interleaved_ms": {str(v): ms for v, ms in table.interleaved.items()},
    }


def _row_json(row: Row) -> dict[str, Any]:
    outcome = asdict(row.outcome)
    for name in ("seconds", "losses", "overhead"):
        outcome[name] = {str(each): value for each, value in outcome[name].items()}
    estimates = {"ms": row.outcome.ms, "speed_up": row.speed_up}
    outcome |= {name: None if value is None else asdict(value) for name, value in estimates.items()}
    return outcome | {name: getattr(row, name) for name in _FACTS} | {"peak_bytes": row.outcome.peak_bytes}


def write(directory: Path, table: Table, about: Mapping[str, Any], *, title: str) -> list[Path]:
    """Write bench.md, bench.json and, with matplotlib, bench.png, each atomically. Returns their paths."""
    files = {
        "bench.md": f"# {title}\n\n{markdown(table, about)}",
        JSON: json.dumps(to_json(table, about), indent=1) + "\n",
    }
    written = []
    for name, content in files.items():
        replace_text(directory / name, content)
        written.append(directory / name)
    if can_draw() and any(row.speed_up is not None for row in table.rows):
        _draw(table, directory / "bench.png", title=title)
        written.append(directory / "bench.png")
    return written


def _draw(table: Table, file: Path, *, title: str) -> None:
    """Speed-ups as points with their intervals, and beside them speed-up against memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (forest, memory) = pyplot.subplots(1, 2, figsize=(11.0, 2.0 + 0.4 * len(table.rows)), width_ratios=(3, 2))
    rows = [(row, row.speed_up) for row in table.rows if row.speed_up is not None]
    for place, (row, ratio) in enumerate(rows):
        low, high = ratio.low or ratio.value, ratio.high or ratio.value
        forest.plot([low, high], [place, place], color="#4a7a99")
        forest.plot(ratio.value, place, "o", color="#4a7a99", label="measured, 95 %" if place == 0 else None)
        if row.predicted_speed_up is not None:
            label = "predicted" if place == 0 else None
            forest.plot(row.predicted_speed_up, place, "D", markerfacecolor="none", color="black", label=label)
        if row.outcome.peak_bytes is not None:
            at = (row.outcome.peak_bytes / 2**30, ratio.value)
            memory.plot(*at, "o", color="#4a7a99")
            memory.annotate(row.outcome.name, at, xytext=(4, 4), textcoords="offset points", fontsize=8)
    forest.set_yticks(range(len(rows)), [row.outcome.name for row, _ in rows])
    forest.invert_yaxis()
    forest.axvline(1.0, color="grey", linewidth=0.8)
    memory.axhline(1.0, color="grey", linewidth=0.8)
    memory.margins(0.2)
    forest.set(xlabel=f"speed-up over {table.baseline}")
    memory.set(xlabel="peak GiB of the fullest rank", ylabel=f"speed-up over {table.baseline}")
    forest.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    unfinished = file.with_name(f".{file.name}.new")
    figure.savefig(unfinished, dpi=150, format="png")
    unfinished.replace(file)
    pyplot.close(figure)
