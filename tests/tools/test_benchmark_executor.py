"""The command line: tools/benchmarks/executor.py measures every layer; the times are not tested."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from tools.benchmarks import executor

ROOT = Path(__file__).parents[2]
SMALL = ["--num-ranks", "3", "--num-microbatches", "2", "--repeats", "2"]
MEASUREMENT = {"schedule", "layer", "rank", "num_ops", "min_us", "median_us", "max_us"}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return executor


def test_every_layer_is_measured_on_every_rank(tool: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert tool.main([*SMALL, "--schedule", "zb-h1", "--schedule", "zbv", "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    assert body["format"] == "zerobubble-executor-benchmark/1"
    assert all(set(row) == MEASUREMENT for row in body["slowest"] + body["ranks"])
    layers = ["executor", "timed", "process group", "model"]
    assert [(row["schedule"], row["layer"]) for row in body["slowest"]] == [(s, y) for s in ("zb-h1", "zbv") for y in layers]
    assert [row["rank"] for row in body["ranks"] if row["schedule"] == "zbv"] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 2]
    assert {row["num_ops"] for row in body["ranks"] if row["schedule"] == "zbv"} == {12}
    assert all(row["min_us"] <= row["median_us"] <= row["max_us"] for row in body["ranks"])
    assert not dist.is_initialized()


def test_the_table_and_the_file(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert tool.main([*SMALL, "--schedule", "1f1b", "--without-model", "--json", str(path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["schedule", "layer", "rank", "ops", "min", "median", "max", "us/op"]
    assert [row.split("  ")[0] for row in rows] == ["1f1b"] * 3
    assert len(json.loads(path.read_text())["ranks"]) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--schedule", "zb-v"], "did you mean 'zbv'"), (["--repeats", "0"], "--repeats must be 1 or more")],
)
def test_user_errors(tool: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        tool.main([*SMALL, *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_the_published_result_is_of_this_format() -> None:
    """The executor overhead stays under 60 microseconds per op."""
    body = json.loads((ROOT / "docs" / "benchmarks" / "data" / "executor.json").read_text())
    assert body["format"] == "zerobubble-executor-benchmark/1"
    assert all(set(row) == MEASUREMENT for row in body["slowest"])
    assert max(row["median_us"] for row in body["slowest"]) < 60
