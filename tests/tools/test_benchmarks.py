"""What the benchmarks report, not times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.benchmarks import executor
from tools.benchmarks.one_gpu.setting import choose_device
from tools.benchmarks.reports import LONGEST_LINE, json_text, read_json

ROOT = Path(__file__).parents[2]


def test_a_report_has_a_line_per_row() -> None:
    rows = [{"p": p, "times": {"ms": [0.25] * 60}} for p in range(5)]
    report = {"format": "a/1", "rows": rows, "about": {}, "long": [{"a": [1] * 300, "b": [2] * 300}]}
    text = json_text(report)
    assert json.loads(text) == report
    assert [text.splitlines().count(f"  {json.dumps(row)},") for row in rows] == [1, 1, 1, 1, 0]
    assert len(text.splitlines()) == 17
    assert max(map(len, text.splitlines())) <= LONGEST_LINE


SMALL = ["--num-ranks", "3", "--num-microbatches", "2", "--repeats", "2"]
MEASUREMENT = {"schedule", "layer", "rank", "num_ops", "min_us", "median_us", "max_us"}


def test_every_layer_is_measured_on_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert executor.main([*SMALL, "--schedule", "zb-h1", "--schedule", "zbv", "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    assert body["format"] == "zerobubble-executor-benchmark/1"
    assert all(set(row) == MEASUREMENT for row in body["slowest"] + body["ranks"])
    layers = ["executor", "watched", "run"]
    assert [(row["schedule"], row["layer"]) for row in body["slowest"]] == [(s, y) for s in ("zb-h1", "zbv") for y in layers]
    assert [row["rank"] for row in body["ranks"] if row["schedule"] == "zbv"] == [0, 1, 2] * 3
    assert {row["num_ops"] for row in body["ranks"] if row["schedule"] == "zbv"} == {12}
    assert all(row["min_us"] <= row["median_us"] <= row["max_us"] for row in body["ranks"])
    assert capsys.readouterr().out.splitlines()[2:] == executor.table(body)[2:]
    assert executor.main([*SMALL, "--repeats", "0"]) == 2
    assert "--repeats must be 1 or more" in capsys.readouterr().err


def test_the_published_result_is_of_this_format() -> None:
    """What a run turns on takes at most 10 microseconds per op, and README has it."""
    body = read_json(str(ROOT / "docs" / "benchmarks" / "data" / "executor.json"), executor.FORMAT)
    assert all(set(row) == MEASUREMENT for row in body["slowest"])
    assert executor.markdown(body) == executor.PAGE.read_text(encoding="utf-8")
    medians = [row["median_us"] for row in body["slowest"] if row["layer"] == "run"]
    assert max(medians) <= 10
    assert f"| {min(medians):.0f} to {max(medians):.0f} µs per op |" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_published_share_of_memory_after_b_by_hand() -> None:
    """``32 sbh`` of ``sbh (34 + 5 a s / h)``, for the models of arXiv 2401.10241."""
    published = {row["model"]: row for row in json.loads((ROOT / "docs/benchmarks/data/published.json").read_text())["configs"]}
    for name, heads, hidden in (("1.5B", 24, 2304), ("6.2B", 32, 4096), ("14.6B", 40, 5120), ("28.3B", 48, 6144)):
        share = 32 / (34 + 5 * heads * 1024 / hidden)
        assert share == pytest.approx(published.pop(name)["activation_after_backward"], abs=1e-4)
    assert not published


def test_a_gpu_has_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device takes no device without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(None) == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")
