"""tools/benchmarks/unequal.py on few batches: that its report is correct, not how good the plans are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmarks.unequal import ATTENTION_SHARE, DISTRIBUTIONS, LINK_CASES, library_lengths, main, markdown

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a result of two ranks."""
    folder = tmp_path_factory.mktemp("benchmark")
    files = ["--json", str(folder / "result.json"), "--markdown", str(folder / "result.md")]
    assert main(["--ranks", "2", "--draws", "2", "--budget", "2000", *files]) == 0
    return folder


def test_the_report_has_every_row_and_its_page_is_made_from_it(folder: Path) -> None:
    report = json.loads((folder / "result.json").read_text())
    assert [row["lengths"] for row in report["unequal"]] == list(DISTRIBUTIONS)
    assert len(report["links"]) == 2 * len(LINK_CASES)
    for row in report["unequal"]:
        ours = row["contenders"]["zbv planned"]
        assert ours["least_speedup_of_planned"] == 1.0
        for name in ("zbv as it comes", "zbv sorted"):
            assert row["contenders"][name]["least_speedup_of_planned"] >= 1 - 1e-9
        for contender in row["contenders"].values():
            assert contender["idle"]["low"] <= contender["idle"]["value"] <= contender["idle"]["high"]
            assert 0 <= contender["idle"]["value"] < 1
    assert all(row["ratio"] >= 1 - 1e-9 for row in report["links"])
    again = folder / "again.md"
    assert main(["--from-json", str(folder / "result.json"), "--markdown", str(again)]) == 0
    assert again.read_text() == (folder / "result.md").read_text() == markdown(report)
    assert "**Simulated**, 2 batches per row." in again.read_text()


def test_the_kept_report_is_the_page_and_no_plan_is_slower_than_the_data_as_it_comes_or_sorted() -> None:
    report = json.loads((KEPT / "data" / "unequal.json").read_text())
    assert (KEPT / "unequal.md").read_text() == markdown(report)
    for row in report["unequal"]:
        for name in ("zbv as it comes", "zbv sorted"):
            assert row["contenders"][name]["least_speedup_of_planned"] >= 1 - 1e-9
    assert min(row["ratio"] for row in report["links"]) >= 1 - 1e-9
    assert max(row["most_seconds"] for row in report["unequal"] if row["p"] == 8) <= 0.05


def test_readme_says_what_the_results_say() -> None:
    rows = json.loads((KEPT / "data" / "unequal.json").read_text())["unequal"]
    (row,) = [row for row in rows if row["p"] == 8 and row["lengths"] == "log-normal 0.6"]
    gains = {name: contender["speedup_of_planned"]["value"] for name, contender in row["contenders"].items()}
    readme = " ".join((KEPT.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f"{gains['interleaved sorted']:.2f} times as fast as interleaved 1F1B sorted by length" in readme
    assert f"by length, {gains['1f1b sorted']:.2f} as 1F1B sorted" in readme


def test_documents_are_the_standard_library() -> None:
    lengths = library_lengths()
    assert len(lengths) > 300
    assert min(lengths) >= 1
    assert max(lengths) == 8192
    assert DISTRIBUTIONS["standard library"][1] == ATTENTION_SHARE
