"""The index of the architecture decision records: every number has a row or a word about it, and a withdrawn record says so."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "adr"
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
ROWS = {int(number): row for number, row in re.findall(r"^\| (\d+) \| (.*)$", INDEX, re.MULTILINE)}
FILES = {int(path.name[:4]): path for path in FOLDER.glob("[0-9]*.md")}


def test_the_index_has_a_row_for_every_record_and_names_the_numbers_without_one() -> None:
    assert all(f"]({FILES[number].name})" in row for number, row in ROWS.items())
    assert ROWS.keys() == FILES.keys()
    unused = re.search(r"^Numbers ([\d, and]+) were reserved", INDEX, re.MULTILINE)
    assert unused is not None
    named = set(map(int, re.findall(r"\d+", unused[1])))
    assert named == set(range(1, max(FILES) + 1)) - FILES.keys()


def test_a_withdrawn_record_says_so_in_the_index_and_why_in_its_status() -> None:
    for number, path in FILES.items():
        status = path.read_text(encoding="utf-8").split("\n## ", 1)[0]
        assert ("withdrawn" in ROWS[number]) == ("withdrawn" in status), path.name
        assert "withdrawn" not in status or "because" in status, path.name
