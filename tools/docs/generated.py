"""Pages that are generated: write one, or check that the file is up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def write_or_check(command: str, default: Path, page: Callable[[], str], argv: Sequence[str] | None) -> int:
    """The command line of a generated page. Returns the exit code.

    Args:
        command: what a user types.
        default: the file of the page.
        page: makes its text.
        argv: words after the command.
    """
    parser = argparse.ArgumentParser(prog=command, description=f"Write docs/{default.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help=f"the page (default: docs/{default.name})")
    args = parser.parse_args(argv)
    wanted = page()
    if not args.check:
        args.output.write_text(wanted, encoding="utf-8")
        return 0
    if args.output.is_file() and args.output.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"{args.output} is out of date: run `{command}`", file=sys.stderr)
    return 1
