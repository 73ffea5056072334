"""Wrap the prose of the pages at 120 characters; code, tables, headings and links stay as they are.

Only a paragraph or list item with a longer line is wrapped again. Run it after writing long lines::

    python -m tools.docs.wrap            # rewrites the pages
    python -m tools.docs.wrap --check    # exit code 1 if a page has longer lines
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

__all__ = ["COMMAND", "WIDTH", "main", "pages", "wrapped"]

COMMAND = "python -m tools.docs.wrap"
WIDTH = 120
ROOT = Path(__file__).parents[2]
_MARKER = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
_VERBATIM = re.compile(r"\s*(?:\||#|<!--|<|\[[^\]]+\]: |!\[)| {4,}(?![-*+] |\d+\. )")
"""The start of a line that is no prose: a table, a heading, HTML, a link's target, an image, indented code."""
_WHOLE = re.compile(r"`[^`]+`|\[[^\]]{1,40}\](?=\()| (?=%|(?:[-*+#|>]|\d+[.)])(?:\s|$))")
"""What no line break may split: code, a link's text, a percentage, a word that would begin a list, heading, table or quote."""
_GLUE = "\x00"


def pages() -> list[Path]:
    """The pages that are wrapped."""
    return sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])


def wrapped(text: str) -> str:
    """The text of a page with its long lines wrapped."""
    lines: list[str] = []
    block: list[str] = []
    is_code = False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        is_prose = bool(line.strip()) and not is_code and not fence and (bool(block) or not _VERBATIM.match(line))
        if not is_prose or _MARKER.match(line) or (line.lstrip()[:1] == "|"):
            lines += _filled(block)
            block = []
        if is_prose and line.lstrip()[:1] != "|":
            block.append(line)
        else:
            lines.append(line)
        is_code ^= fence
    return "\n".join([*lines, *_filled(block)])


def _filled(block: Sequence[str]) -> list[str]:
    """One paragraph or list item, in lines of at most `WIDTH` characters."""
    if all(len(line) <= WIDTH for line in block):
        return list(block)
    marker = _MARKER.match(block[0])
    first = marker[0] if marker else block[0][: len(block[0]) - len(block[0].lstrip())]
    words = " ".join([block[0][len(first) :].strip(), *(line.strip() for line in block[1:])])
    glued = _WHOLE.sub(lambda found: found[0].replace(" ", _GLUE), words)
    filled = textwrap.wrap(
        glued,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in filled]


def main(argv: Sequence[str] | None = None) -> int:
    """Wrap or check the pages. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Wrap the prose of the pages at 120 characters.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page has longer lines")
    args = parser.parse_args(argv)
    long = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if wrapped(text) != text:
            long += 1
            if args.check:
                print(f"{page.relative_to(ROOT)} has lines of more than {WIDTH} characters: run `{COMMAND}`", file=sys.stderr)
            else:
                page.write_text(wrapped(text), encoding="utf-8")
    return 1 if args.check and long else 0


if __name__ == "__main__":
    sys.exit(main())
