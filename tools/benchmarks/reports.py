"""Shared by the benchmarks: the published times, where a report was made, its JSON file and its page, and Markdown tables."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "benchmarks" / "data" / "published.json"
"""Profiled times and bubble rates of arXiv 2401.10241, tables 8 and 9."""

LONGEST_LINE = 1200
"""Characters of an object or list that is one line of a report's JSON."""

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


def json_text(value: Any, indent: str = "") -> str:
    """JSON with a line per row: below the outermost object each object or list is one line if `LONGEST_LINE` allows it."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or (indent and len(line) <= LONGEST_LINE):
        return line
    more = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {json_text(each, more)}" for name, each in value.items()]
    else:
        parts = [json_text(each, more) for each in value]
    inner = ",\n".join(more + part for part in parts)
    return f"{line[0]}\n{inner}\n{indent}{line[-1]}"


def write_json(body: Row, target: str) -> None:
    """Write a report to a file."""
    Path(target).write_text(json_text(body) + "\n", encoding="utf-8")


def read_json(file: str, fmt: str) -> Row:
    """Read a report of this format. Raises ConfigError on any other file."""
    try:
        body = json.loads(Path(file).read_text(encoding="utf-8"))
        if body["format"] == fmt:
            return dict(body)
    except (ValueError, LookupError, TypeError):
        pass
    raise ConfigError(f"{file} was not written by --json of this tool (format {fmt})")


def run_report(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    fmt: str,
    measure: Callable[[argparse.Namespace], Row],
    markdown: Callable[[Row], str],
    printed: Callable[[Row], str] | None = None,
) -> int:
    """Run a benchmark whose report is a JSON file and a page; returns the exit code, 2 after a user error.

    Args:
        parser: its own arguments; `command` is added to what they parse to.
        argv: its arguments; None: those of the process.
        fmt: the `format` of the report.
        measure: makes the report; not called with --from-json.
        markdown: the report as a page.
        printed: what is printed without --markdown; None: the page.
    """
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the report as a page (default: print the result)")
    parser.add_argument("--from-json", metavar="FILE", help="measure nothing: read a report from this file")
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words, argparse.Namespace(command=f"{parser.prog} {shlex.join(words)}"))
    try:
        report = read_json(args.from_json, fmt) if args.from_json else {"format": fmt} | measure(args)
        if args.json:
            write_json(report, args.json)
        if args.markdown:
            Path(args.markdown).write_text(markdown(report), encoding="utf-8")
        else:
            print((printed or markdown)(report))
    except (UserError, OSError, ValueError) as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def markdown_table(heads: Sequence[str], lines: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)]


def with_tables(page: Path, tables: Iterable[Sequence[str]]) -> str:
    """The text of a page, whose prose is written by hand, with its tables replaced by those that have the same heads."""
    text = page.read_text(encoding="utf-8")
    for table in tables:
        start = text.index(f"{table[0]}\n")
        end = start + len("".join(itertools.takewhile(lambda line: line.startswith("|"), text[start:].splitlines(True))))
        text = text[:start] + "".join(f"{line}\n" for line in table) + text[end:]
    return text


def mean_and_range(values: Sequence[float], form: str = ".2f") -> str:
    """`1.06 (1.03 to 1.10)`, or one number where all are shown alike."""
    mean, least, most = (f"{value:{form}}" for value in (statistics.fmean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"
