"""The command line of tools.benchmarks.attention: it measures every part, and its arithmetic is right; speed is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.wgrad.gemm import choose_kernel
from tools.benchmarks import attention
from tools.benchmarks.wgrad.shapes import shape_named
from tools.benchmarks.wgrad.stack import Stack, world_of_one

CPU = torch.device("cpu")


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attention.json"
    sizes = ["--hidden-size", "256", "--seq-length", "512", "--repeats", "2"]
    assert attention.main([*sizes, "--json", str(path)]) == 0
    assert not dist.is_initialized()
    body = json.loads(path.read_text())
    assert [each["kind"] for each in body["results"]] == ["gpt", "llama"]
    for each in body["results"]:
        assert all(each[name]["value"] > 0 for name in ("speedup", "split_ratio"))
        scores = 4 * 4 * 512**2  # heads, fp32
        kept = each["own_bytes"] - each["torch_bytes"]
        assert 0.9 * scores < kept < 1.1 * scores
    printed = capsys.readouterr().out
    assert attention.main(["--from", str(path)]) == 0
    assert capsys.readouterr().out == printed


def test_the_ratio_of_a_round_is_taken_before_the_median() -> None:
    turns: list[str] = []

    def contender(name: str, times: list[float]) -> dict[str, float]:
        turns.append(name)
        return {"F": times[turns.count(name) - 1], "BW": 0.0}

    contenders = {
        "own": lambda: contender("own", [9.0, 8.0, 2.0, 30.0]),
        "torch": lambda: contender("torch", [9.0, 4.0, 2.0, 10.0]),
    }
    rounds = attention.run_rounds(contenders, 3)
    assert turns == ["own", "torch", "torch", "own", "own", "torch", "torch", "own"]
    estimate = attention._ratio(rounds, attention._whole("own"), attention._whole("torch"))
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_computed_activation_memory_is_what_a_layer_keeps(batch: int, dtype: torch.dtype) -> None:
    shape = attention.shape_of("gpt", 192, 256, batch)
    with world_of_one(CPU) as host:
        stack = Stack(shape, 2, dtype, CPU, host, choose_kernel(CPU, input_dtype=dtype, accumulator_dtype=torch.float32))
        x_sbh = torch.randn(256, batch, 192).to(dtype)
        held = attention.activation_bytes(stack, x_sbh, torch.ones_like(x_sbh))
        stack.close()
    assert held / 2 == pytest.approx(shape.activation_bytes(dtype.itemsize), rel=0.05)


def test_the_papers_layers_keep_32_sbh_without_scores() -> None:
    shape = shape_named("6.2B")
    assert shape.activation_bytes(2) == 32 * shape.tokens * shape.hidden_size + 4 * shape.num_attention_heads * shape.tokens


def test_sizes_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--hidden-size 100 of a gpt layer must be a multiple of 64"):
        attention.shape_of("gpt", 100, 8, 1)
    with pytest.raises(ConfigError, match="must be a multiple of 256"):
        attention.shape_of("llama", 64, 8, 1)
    with pytest.raises(SystemExit):
        attention.main(["--repeats", "0"])
    assert "--repeats is 0" in capsys.readouterr().err
