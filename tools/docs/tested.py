"""Write docs/tested.md: what was tested, from the claims that stand at the tests.

A test, or a file as a whole (`pytestmark`), says what it shows with ``pytest.mark.claims(section, what, state)``; `also` names
other files or folders of tests with a part in it. The prose is `tools/docs/tested_prose.md`, where each section of claims has a
line ``<!-- claims -->``. The files are read, not imported, so this needs no torch.

Run it after a change of a claim::

    python -m tools.docs.tested            # rewrites docs/tested.md
    python -m tools.docs.tested --check    # exit code 1 if the page is out of date
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.docs.generated import DOCS, write_or_check
from tools.docs.wrap import wrapped

__all__ = ["COMMAND", "PAGE", "Claim", "claims_of", "main", "page"]

COMMAND = "python -m tools.docs.tested"
PAGE = DOCS / "tested.md"
PROSE = Path(__file__).parent / "tested_prose.md"
TESTS = DOCS.parent / "tests"
PLACE = "<!-- claims -->"
HEAD = ("| what | state | where |", "|---|---|---|")


class Claim(NamedTuple):
    """One row of the page."""

    section: str
    what: str
    state: str
    where: tuple[str, ...]
    """Files or folders of tests, below `tests/`."""

    @property
    def row(self) -> str:
        """The row in Markdown."""
        return f"| {self.what} | {self.state} | {', '.join(f'`{name}`' for name in self.where)} |"


def claims_of(text: str, name: str) -> Iterator[Claim]:
    """The claims in the text of a test file, from top to bottom.

    Raises:
        ValueError: a claim is not written out, or the file has no test.
    """
    tree = ast.parse(text)
    has_test = any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.claims"]
    for call in sorted(calls, key=lambda call: call.lineno):
        try:
            section, what, state = map(ast.literal_eval, call.args)
            options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
            also = tuple(options.pop("also", ()))
        except ValueError:
            raise ValueError(f"{name}:{call.lineno}: a claim takes a section, a sentence and a state, as literals") from None
        if options or not has_test:
            raise ValueError(f"{name}:{call.lineno}: a claim takes no option but also, and stands in a file with a test")
        yield Claim(section, what, state, (name, *also))


def page() -> str:
    """The whole page as Markdown.

    Raises:
        ValueError: a claim of a section that the prose does not have, or a place that does not exist.
    """
    found: dict[str, list[Claim]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        for claim in claims_of(path.read_text(encoding="utf-8"), name):
            missing = [each for each in claim.where if not (TESTS / each).exists()]
            if missing:
                raise ValueError(f"{name} has a claim that is also shown by {', '.join(missing)}, which does not exist")
            found.setdefault(claim.section, []).append(claim)
    lines = [f"<!-- Generated from the tests and {PROSE.relative_to(DOCS.parent)} by `{COMMAND}`. Do not edit. -->", ""]
    section = ""
    for line in PROSE.read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        lines += [*HEAD, *(claim.row for claim in found.pop(section, []))] if line == PLACE else [line]
    if found:
        raise ValueError(f"{PROSE.name} has no section with the line {PLACE} that is called {', '.join(found)}")
    return wrapped("\n".join([*lines, ""]))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page. Returns the exit code."""
    return write_or_check(COMMAND, PAGE, page, argv)


if __name__ == "__main__":
    sys.exit(main())
