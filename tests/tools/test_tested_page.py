"""docs/tested.md: the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_that_the_page_names_exist() -> None:
    page = (ROOT / "docs" / "tested.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+test_\w+\.py)`", page))
    assert len(named) > 30
    assert not [name for name in sorted(named) if not (ROOT / "tests" / name).is_file()]
