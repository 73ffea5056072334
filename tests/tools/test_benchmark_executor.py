"""The command line: tools/benchmarks/executor.py measures every layer; the times are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from tools.benchmarks import executor

ROOT = Path(__file__).parents[2]
SMALL = ["--num-ranks", "3", "--num-microbatches", "2", "--repeats", "2"]
MEASUREMENT = {"schedule", "layer", "rank", "num_ops", "min_us", "median_us", "max_us"}


def test_every_layer_is_measured_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert executor.main([*SMALL, "--schedule", "zb-h1", "--schedule", "zbv", "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    assert body["format"] == "zerobubble-executor-benchmark/1"
    assert all(set(row) == MEASUREMENT for row in body["slowest"] + body["ranks"])
    layers = ["executor", "timed", "process group", "model"]
    assert [(row["schedule"], row["layer"]) for row in body["slowest"]] == [(s, y) for s in ("zb-h1", "zbv") for y in layers]
    assert [row["rank"] for row in body["ranks"] if row["schedule"] == "zbv"] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 2]
    assert {row["num_ops"] for row in body["ranks"] if row["schedule"] == "zbv"} == {12}
    assert all(row["min_us"] <= row["median_us"] <= row["max_us"] for row in body["ranks"])
    assert not dist.is_initialized()


def test_the_published_result_is_of_this_format() -> None:
    """The executor overhead stays under 60 microseconds per op."""
    body = json.loads((ROOT / "docs" / "benchmarks" / "data" / "executor.json").read_text())
    assert body["format"] == "zerobubble-executor-benchmark/1"
    assert all(set(row) == MEASUREMENT for row in body["slowest"])
    assert max(row["median_us"] for row in body["slowest"]) < 60
