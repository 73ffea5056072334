"""Benchmarks of the executor, of the split and of post-validation: what they report, not times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.tolerances import OTHER_ORDER
from tests.training.launch import environment
from tools.benchmarks import executor, slice_passes, split
from tools.benchmarks.reports import LONGEST_LINE, json_text

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


def test_every_layer_is_measured_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert executor.main([*SMALL, "--schedule", "zb-h1", "--schedule", "zbv", "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    assert body["format"] == "zerobubble-executor-benchmark/1"
    assert all(set(row) == MEASUREMENT for row in body["slowest"] + body["ranks"])
    layers = ["executor", "timed", "watched", "process group", "model"]
    assert [(row["schedule"], row["layer"]) for row in body["slowest"]] == [(s, y) for s in ("zb-h1", "zbv") for y in layers]
    assert [row["rank"] for row in body["ranks"] if row["schedule"] == "zbv"] == [0, 1, 2] * 4 + [2]
    assert {row["num_ops"] for row in body["ranks"] if row["schedule"] == "zbv"} == {12}
    assert all(row["min_us"] <= row["median_us"] <= row["max_us"] for row in body["ranks"])
    assert not dist.is_initialized()


def test_the_published_result_is_of_this_format() -> None:
    """The executor overhead stays under 60 microseconds per op, and README has what a job under `zerobubble run` has in sum."""
    body = json.loads((ROOT / "docs" / "benchmarks" / "data" / "executor.json").read_text())
    assert body["format"] == "zerobubble-executor-benchmark/1"
    assert all(set(row) == MEASUREMENT for row in body["slowest"])
    assert max(row["median_us"] for row in body["slowest"]) < 60
    medians = {(row["schedule"], row["layer"]): row["median_us"] for row in body["slowest"]}
    sums = [
        walk + sum(medians[schedule, more] - walk for more in ("watched", "process group", "model"))
        for (schedule, layer), walk in medians.items()
        if layer == "executor"
    ]
    assert f"| {min(sums):.0f} to {max(sums):.0f} µs per op |" in (ROOT / "README.md").read_text(encoding="utf-8")


TINY = ["--device", "cpu", "--scale", "0.02", "--repeats", "2", "--warmup", "1", "--num-layers", "2", "--dtype", "bf16"]
PASSES = ("forward_ms", "backward_ms", "wgrad_ms", "fused_ms", "stock_ms", "split_ratio")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one run on a tiny GPT layer and a tiny Llama layer."""
    path = tmp_path_factory.mktemp("split") / "split.json"
    assert split.main([*TINY, "--shape", "6.2B", "--shape", "llama-3-8b", "--json", str(path)]) == 0
    assert not dist.is_initialized()
    body: dict[str, Any] = json.loads(path.read_text())
    return body


def test_flops_and_bytes_by_hand() -> None:
    """Table 1 of arXiv 2401.10241: W = 24 sbh^2 FLOPs, F + B + W = sbh(72h + 12s), 32 sbh bytes from B to W in 16 bits."""
    for name, heads, hidden, batch in (
        ("1.5B", 24, 2304, 6),
        ("6.2B", 32, 4096, 3),
        ("14.6B", 40, 5120, 1),
        ("28.3B", 48, 6144, 1),
    ):
        shape = split.shape_named(name)
        tokens = 1024 * batch
        assert (shape.hidden_size, shape.num_attention_heads, shape.tokens) == (hidden, heads, tokens)
        assert shape.linear_flops == 24 * tokens * hidden**2
        assert shape.model_flops == tokens * hidden * (72 * hidden + 12 * 1024)
        assert shape.held_bytes(2) == shape.paper_held_bytes() == 32 * tokens * hidden
    # The published share of a microbatch's memory that stays after B, from the same profiles.
    published = {row["model"]: row for row in json.loads((ROOT / "docs/benchmarks/data/published.json").read_text())["configs"]}
    for name, row in published.items():
        shape = split.shape_named(name)
        share = shape.paper_held_bytes() / shape.paper_activation_bytes()
        assert share == pytest.approx(row["activation_after_backward"], abs=1e-4)


def test_every_pass_and_every_kernel_is_measured(result: dict[str, Any]) -> None:
    assert result["format"] == "zerobubble-split-benchmark/1"
    assert not result["is_gpu"]
    for shape in result["shapes"]:
        layer = shape["measured"]["per_layer"]
        assert all(layer[name] > 0 for name in PASSES)
        assert [product["linear"] for product in shape["measured"]["products"]] == ["qkv", "proj", "fc1", "fc2"]
        assert all({"matmul and add"} <= set(product["kernels_ms"]) for product in shape["measured"]["products"])
        assert sum(product["flops"] for product in shape["measured"]["products"]) == shape["predicted"]["linear_flops"]
        rate = shape["predicted"]["linear_flops"] / layer["wgrad_ms"] / 1e9
        assert shape["measured"]["wgrad_tflops"] == pytest.approx(rate)


def test_w_holds_each_input_and_each_output_gradient_once(result: dict[str, Any]) -> None:
    """Of real layers: nothing is copied for W, and nothing is held that it does not need."""
    for shape in result["shapes"]:
        assert shape["measured"]["per_layer"]["held_bytes"] == shape["predicted"]["needed_bytes"]
        assert shape["verdicts"][2]["is_met"]
    gpt = result["shapes"][0]["predicted"]
    assert gpt["needed_bytes"] == gpt["bytes_32sbh"]


def test_a_gpu_has_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device takes no device without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert split.choose_device(None) == split.choose_device("cuda") == torch.device("cuda", 0)
    assert split.choose_device("cpu") == torch.device("cpu")


def test_slices_of_a_layer_compute_what_the_whole_sequence_does(tmp_path: Path) -> None:
    path = tmp_path / "slices.json"
    tiny = ["--device", "cpu", "--scale", "0.03", "--dtype", "fp32", "--warmup", "0", "--repeats", "1", "--tokens", "4096"]
    assert slice_passes.main([*tiny, "--slices", "1", "4", "--json", str(path)]) == 0
    whole, cut = json.loads(path.read_text())["rows"]
    assert (whole["slices"], whole["lengths"], sum(cut["lengths"]), len(cut["lengths"])) == (1, [64], 64, 4)
    assert max(cut["apart"]) < OTHER_ORDER
    for name in ("forward", "backward", "wgrad"):
        assert len(cut[f"{name}_ms_by_slice"]) == 4
        assert all(each > 0 for each in cut[f"{name}_ms_by_slice"])


TWO_RANKS = ["--num-ranks", "2", "--num-microbatches", "4", "--iterations", "1", "--repeats", "2"]
TIMES = ["--forward-ms", "2", "--backward-ms", "2", "--wgrad-ms", "2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.benchmarks.post_validation", *TWO_RANKS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment(), cwd=ROOT)


@pytest.mark.sampled(0.2, group="tools that measure")
def test_measures_both_kinds_of_steps_beside_the_prediction(tmp_path: Path) -> None:
    done = run(*TIMES, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    body = json.loads((tmp_path / "out.json").read_text())
    assert body["format"] == "zerobubble-post-validation-benchmark/1"
    assert [row["schedule"] for row in body["schedules"]] == ["zb-h2", "zbv"]
    for row in body["schedules"]:
        assert row["simulated_span_ms"] == 24.0, "four microbatches without a bubble"
        assert row["simulated_makespan_ms"] > 24.0
        assert len(row["synchronous_ms"]) == len(row["early_ms"]) == 2
        assert min(row["synchronous_ms"] + row["early_ms"]) > 12.0, "the passes take their time"
        assert row["reached_least"] <= row["reached"] <= row["reached_most"]
        assert row["schedule"] in done.stdout
