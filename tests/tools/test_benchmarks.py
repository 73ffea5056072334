"""Benchmarks of the executor, and of passes: what they report, not times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tools.benchmarks import executor
from tools.benchmarks.one_gpu import passes
from tools.benchmarks.one_gpu.clock import in_turn, rounds
from tools.benchmarks.one_gpu.layer_shape import LayerShape
from tools.benchmarks.one_gpu.setting import Setting, choose_device
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


TINY = Setting(device=torch.device("cpu"), scale=0.016)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The passes of a tiny Llama layer, through JSON."""
    row: dict[str, Any] = json.loads(json.dumps(passes.measure(TINY)))
    assert not dist.is_initialized()
    return row


def test_flops_and_bytes_by_hand() -> None:
    """Table 1 of arXiv 2401.10241: W = 24 sbh^2 FLOPs, 32 sbh bytes from B to W in 16 bits. The 1.5B model."""
    tokens, hidden = 1024 * 6, 2304
    sizes = {"num_attention_heads": 24, "num_query_groups": 24, "ffn_hidden_size": 4 * hidden, "seq_length": 1024}
    shape = LayerShape(hidden_size=hidden, **sizes, micro_batch_size=6, is_llama=False)
    assert shape.linear_flops == 24 * tokens * hidden**2
    assert shape.held_bytes(2) == 32 * tokens * hidden
    llama = Setting(device=torch.device("cpu")).layer(8192)
    assert llama.linear_flops == 2 * 8192 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert llama.held_bytes(2) == 2 * 8192 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)


def test_the_published_share_of_memory_after_b_by_hand() -> None:
    """``32 sbh`` of ``sbh (34 + 5 a s / h)``, for the models of arXiv 2401.10241."""
    published = {row["model"]: row for row in json.loads((ROOT / "docs/benchmarks/data/published.json").read_text())["configs"]}
    for name, heads, hidden in (("1.5B", 24, 2304), ("6.2B", 32, 4096), ("14.6B", 40, 5120), ("28.3B", 48, 6144)):
        share = 32 / (34 + 5 * heads * 1024 / hidden)
        assert share == pytest.approx(published.pop(name)["activation_after_backward"], abs=1e-4)
    assert not published


def test_every_pass_and_every_kernel_is_measured(measured: dict[str, Any]) -> None:
    assert [at["tokens"] for at in measured["lengths"]] == [66, 131]
    for at, tokens in zip(measured["lengths"], passes.TOKENS, strict=True):
        assert all(at["passes"][name] > 0 for name in ("forward_ms", "backward_ms", "wgrad_ms", "fused_ms", "stock_ms", "rounds"))
        assert [gemm["linear"] for gemm in at["gemms"]] == ["qkv", "proj", "fc1", "fc2"]
        assert all("matmul and add" in gemm["kernels_ms"] for gemm in at["gemms"])
        flops = sum(gemm["flops"] for gemm in at["gemms"])
        assert flops == TINY.layer(tokens).linear_flops
        assert at["wgrad_tflops"] == pytest.approx(flops / at["passes"]["wgrad_ms"] / 1e9)
        assert at["verdicts"] == [], "times of a rehearsal"
    page = passes.lines(measured)
    assert len([line for line in page if line.startswith("| 66 | ")]) == 5
    assert not [line for line in page if line.startswith("- ")]


def test_goals_are_list_items_of_the_page(measured: dict[str, Any]) -> None:
    for at in measured["lengths"]:
        at["verdicts"] = passes.verdicts(at | {"passes": at["passes"] | {"split_ratio": 1.05}})
        assert [each["is_met"] for each in at["verdicts"]][::2] == [False, True]
    found = [line for line in passes.lines(measured) if line.startswith("- ")]
    assert len(found) == 6
    assert found[0] == "- s = 66: (B + W) / full backward 1.050, goal <= 1.02: MISSED"


def test_w_holds_each_input_and_each_output_gradient_once(measured: dict[str, Any]) -> None:
    """Of real layers: nothing is copied for W, and nothing is held that it does not need."""
    for at in measured["lengths"]:
        assert at["passes"]["held_bytes"] == at["needed_bytes"]


def test_five_rounds_count_however_long_they_take() -> None:
    assert list(rounds(repeats=9, warmup=2, seconds=0)) == [*range(7)]
    assert list(rounds(repeats=9, warmup=2)) == [*range(11)]
    assert list(rounds(warmup=1, seconds=0, least=2)) == [*range(3)]
    assert [in_turn("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]


def test_a_gpu_has_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device takes no device without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(None) == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")
