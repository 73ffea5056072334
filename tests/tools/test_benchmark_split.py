"""The command line of tools.benchmarks.split: it measures every part, and its arithmetic is right; speed is not tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tools.benchmarks import split

ROOT = Path(__file__).parents[2]
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


def test_a_llama_layer_by_hand() -> None:
    shape = split.shape_named("Llama-3-8B")
    assert [(linear.out, linear.in_) for linear in shape.linears] == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    # inputs 4096 + 4096 + 4096 + 14336, output gradients 6144 + 4096 + 28672 + 4096, two bytes each
    assert shape.held_bytes(2) == 2 * 4096 * (26624 + 43008)


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
