"""Shared by the benchmarks: the published times, where a report was made, its JSON file, and Markdown tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "benchmarks" / "data" / "published.json"
"""Profiled times and bubble rates of arXiv 2401.10241, tables 8 and 9."""

Row = dict[str, Any]
"""An object of a report in its JSON form."""


def origin() -> Row:
    """When, by which version and where a report is made."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} with {os.cpu_count()} CPUs",
    }


def write_json(body: Row, target: str) -> None:
    """Write a report to a file."""
    Path(target).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def read_json(file: str, fmt: str) -> Row:
    """Read a report of this format. Raises ConfigError on any other file."""
    try:
        body = json.loads(Path(file).read_text(encoding="utf-8"))
        if body["format"] == fmt:
            return dict(body)
    except (ValueError, LookupError, TypeError):
        pass
    raise ConfigError(f"{file} was not written by --json of this tool (format {fmt})")


def markdown_table(heads: Sequence[str], lines: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)]


def mean_and_range(values: Sequence[float], form: str = ".2f") -> str:
    """`1.06 (1.03 to 1.10)`, or one number where all are shown alike."""
    mean, least, most = (f"{value:{form}}" for value in (statistics.fmean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"
