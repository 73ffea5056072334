"""The benchmark of a slow link without its two hosts: what it refuses, and the page of its results."""

from __future__ import annotations

import json
import os

import pytest

from tools.benchmarks import slow_link
from tools.benchmarks.reports import ROOT, read_json

PAGE = ROOT / "docs" / "benchmarks" / "slow_link.md"
REPORT = ROOT / "docs" / "benchmarks" / "data" / "slow_link.json"


def test_the_page_is_that_of_the_results() -> None:
    assert slow_link.text(read_json(str(REPORT), slow_link.FORMAT)) in PAGE.read_text(encoding="utf-8")


def test_auto_with_all_links_has_the_plan_of_the_fastest_measured() -> None:
    """Its row may be slower by what two measurements of one plan differ."""
    for result in json.loads(REPORT.read_text(encoding="utf-8"))["results"]:
        rows = {row["name"]: row for row in result["rows"]}
        fastest = min(rows.values(), key=lambda row: row["ms"]["median"])
        assert rows["auto, all links"]["schedule"] == fastest["schedule"]
        assert rows["auto, all links"]["predicted_ms"] == min(row["predicted_ms"] for row in rows.values())


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for arguments, message in (([], "two network namespaces need root"), (["--mbit", "0"], "must be more than 0")):
        with pytest.raises(SystemExit) as exit:
            slow_link.main(arguments)
        assert exit.value.code == 2
        assert message in capsys.readouterr().err
