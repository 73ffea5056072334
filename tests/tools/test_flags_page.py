"""docs/flags.md: generated from the flags, and up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import flags

FROZEN = Path(__file__).parents[1] / "training" / "flags.txt"


def test_the_page_is_up_to_date() -> None:
    assert flags.PAGE.read_text(encoding="utf-8") == flags.page(), f"docs/flags.md is out of date: run `{flags.COMMAND}`"


def test_every_flag_has_one_row() -> None:
    rows = [line.split("`")[1] for line in flags.page().splitlines() if line.startswith("| `")]
    frozen = [flag for flag in FROZEN.read_text().split() if flag not in ("-h", "--help")]
    assert sorted(rows) == sorted(frozen)


def test_every_row_has_three_cells_and_a_text() -> None:
    for line in flags.page().splitlines():
        if line.startswith("| `"):
            cells = line.strip("|").split(" | ")
            assert len(cells) == 3, line
            assert cells[2].strip(), line


def test_check_names_the_command_that_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "flags.md"
    assert flags.main(["--check", "--output", str(page)]) == 1
    page.write_text("something old")
    assert flags.main(["--check", "--output", str(page)]) == 1
    assert f"run `{flags.COMMAND}`" in capsys.readouterr().err
    assert flags.main(["--output", str(page)]) == 0
    assert flags.main(["--check", "--output", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == flags.page()
