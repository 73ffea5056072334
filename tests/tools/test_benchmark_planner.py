"""tools/benchmarks/planner.py on tiny configs: that its report is correct, not how good the plans are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from tools.benchmarks.planner import LIMITS, POINTS, at_bound, findings, main, markdown, summary
from tools.benchmarks.published_times import read_configs
from tools.benchmarks.reports import PUBLISHED, ROOT

TIMES = {"forward_ms": 10.0, "backward_ms": 9.0, "wgrad_ms": 6.0, "comm_ms": 0.5, "activation_after_backward": 0.5}
PEAKS = {"1F1B": 1.0, "ZB-1p": 1.0, "ZB-2p": 2.0, "ZBV": 1.0, "V-half": 1.0, "V-min": 0.5}
REFERENCE = {name: {"bubble_rate": 0.4, "peak_memory": peak, "seconds": 0.1} for name, peak in PEAKS.items()}
BUDGET = 3e6
"""Op evaluations of a search, a twentieth of what --effort fast has."""
CONFIGS = [
    {"model": "tiny", "num_ranks": 2, "num_microbatches": 4, **TIMES, "reference": REFERENCE},
    {"model": "small", "num_ranks": 3, "num_microbatches": 6, **TIMES, "reference": {"ZBV": REFERENCE["ZBV"]}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configs and a result of both sections."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "configs.json").write_text(json.dumps({"about": "made up", "configs": CONFIGS}))
    files = ["--json", str(folder / "result.json"), "--markdown", str(folder / "result.md")]
    with mock.patch.object(Effort, "budget", BUDGET):
        assert main([str(folder / "configs.json"), "--effort", "fast", *files]) == 0
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return body


def rows_of(report: dict[str, Any], section: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report["sections"][section]
    return rows


def options(limit: float) -> SearchOptions:
    return SearchOptions(memory_limit=limit, objective=Objective.SPAN, budget=BUDGET)


def test_points_agree_with_a_simulation(report: dict[str, Any]) -> None:
    rows = rows_of(report, "points")
    named = [(row["row"], row["point"]) for row in rows]
    assert named == [(0, point.name) for point in POINTS] + [(1, "zbv@1"), (1, "zbv@1.25")]
    assert [row["limit"] for row in rows] == [1.0, 2.0, 1.0, 1.0, 0.5, 0.75, 1.25, 1.0, 1.25]
    for row in rows:
        found = make_plan(
            PlanRequest(
                schedule=row["point"].partition("@")[0],
                num_ranks=row["p"],
                num_microbatches=row["m"],
                stages=lambda placement: CostModel.uniform(placement, **TIMES),
                options=options(row["limit"]),
            )
        )
        scored = simulate(found.simulation.plan, CostModel.uniform(found.simulation.plan.placement, **TIMES))
        assert row["ours"] == pytest.approx(scored.bubble_rate, abs=1e-9), "nine decimals"
        assert row["reference"] == 0.4
        assert row["gap"] == pytest.approx(found.bound.gap(scored.span_ms), abs=1e-7)


def test_auto_is_compared_with_the_best_that_fits(report: dict[str, Any]) -> None:
    rows = rows_of(report, "auto")
    assert [(row["row"], row["limit"]) for row in rows] == [(row, limit) for row in (0, 1) for limit in LIMITS]
    assert [row["published"] for row in rows[:7]] == ["V-min"] * 3 + ["1F1B"] * 4
    assert [row["reference"] for row in rows[7:]] == [None] * 3 + [0.4] * 4
    assert all(row["schedule"] in ("1f1b", "interleaved-1f1b", "1f1b-v", "zb", "zb-interleaved", "zbv") for row in rows)


def test_the_table_has_one_line_per_point_over_all_configs() -> None:
    row = {"row": 3, "model": "x", "p": 8, "m": 24, "point": "v-min", "published": "V-min", "reference": 0.2, "seconds": 6.0}
    rows = [row | {"ours": ours, "bound": 0.1, "gap": 0.01} for ours in (0.20004, 0.2002, 0.1)]
    rows.append(row | {"point": "auto@1", "published": None, "reference": None, "ours": 0.3, "bound": 0.3, "gap": 0.0})
    rows.append(row | {"point": "auto@1", "published": "ZBV", "ours": 0.1, "bound": 0.05, "gap": 0.04, "seconds": 8.0})
    assert summary(rows) == [
        "| v-min | V-min | 0.83 (0.50 to 1.00) | 2 of 3 | 1 of 3 | 1.00 | 6.0 |",
        "| auto@1 | ZBV | 0.50 | 1 of 1 | 1 of 2 | 2.00 (0.00 to 4.00) | 7.0 |",
    ]


def test_what_is_above_the_published_rate_or_rises_with_memory_is_a_finding() -> None:
    row = {"row": 3, "model": "x", "p": 8, "m": 24, "point": "auto@1", "reference": 0.2, "bound": 0.1, "seconds": 6.0}
    above = findings({"points": [row | {"ours": ours} for ours in (0.20004, 0.2002)]})
    assert above == [
        "- Above the published rate: row 3 (x), p=8, m=24, auto@1: ours 0.2002, bound 0.1000, reference 0.2000, 6.0 s."
    ]
    rates = (("auto@0.75", 0.1), ("auto@1", 0.11))
    (rises,) = findings({"auto": [row | {"point": point, "ours": ours} for point, ours in rates]})
    assert rises.startswith("- `auto` finds less with more memory: row 3")
    assert rises.endswith("and 0.1000 at auto@0.75.")
    assert findings({"auto": [row | {"ours": 0.1}, row | {"row": 4, "ours": 0.11}]}) == []


def test_the_page_is_that_of_the_recorded_plans_and_the_readme_says_the_same() -> None:
    body = json.loads((ROOT / "docs/benchmarks/data/planner.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/benchmarks/planner.md").read_text(encoding="utf-8")
    assert markdown(body) == page
    assert "Above the published rate" not in page
    rows = body["sections"]["points"]
    assert all(at_bound(row) for row in rows if row["point"] == "zbv@1" and row["p"] <= 16)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "never above the published bubble; ZBV's equals a lower bound for p = 8 and 16" in readme


def test_the_page_is_rendered_from_the_json(folder: Path, tmp_path: Path) -> None:
    text = (folder / "result.md").read_text()
    assert "| zbv@1 | ZBV | " in text
    again = tmp_path / "again.md"
    assert main(["--from-json", str(folder / "result.json"), "--markdown", str(again)]) == 0
    assert again.read_text() == text


def test_a_published_peak_is_that_of_whole_stages_where_it_rounds_to_it() -> None:
    """17 of 32 microbatches and 13 of 24 are published with four decimals; 1.979 is no whole number of stages."""
    peaks = [reference.peak_memory for config in read_configs(PUBLISHED, "10,15,0") for reference in config.reference.values()]
    assert {17 / 32, 13 / 24, 1.979} <= set(peaks)
    assert not {0.5312, 0.5417} & set(peaks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/file"], "No such file"),
        (["{folder}/result.json"], "no readable configs"),
        (["{folder}/configs.json", "--rows", "2"], "--rows is '2'"),
        (["--jobs", "0"], "--jobs must be 1 or more"),
        (["--from-json", "{folder}/configs.json", "--markdown", "unused.md"], "not written by --json"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([word.format(folder=folder) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
